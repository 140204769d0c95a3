"""Processes that hold parts of one model are put together by their weights, and what is wrong with the parts is named."""

import dataclasses
import json

import corpus
import numpy as np
import pytest
from common import ROOT

from stepaudit.errors import UsageError
from stepaudit.judge import compare
from stepaudit.mesh import count_data_parts, find_places, read_mesh
from stepaudit.recording import MicroStep, Recording, Step
from stepaudit.script import audit_script
from stepaudit.together import find_dead_parts, put_together

TOLERANCE = 1e-9
AUDITED = ROOT / "tests" / "audited"
SHAPES = {"words": (6, 4), "norm": (4,), "up": (8, 4), "bias": (8,), "down": (4, 8), "last": (4,)}


def draw_weights() -> dict[str, np.ndarray]:
    """Weights of a small model: a norm of ones, and biases of zeros, are the same in all parts."""
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    return weights | {"norm": np.ones(4), "last": np.ones(4), "bias": np.zeros(8)}


def record(
    weights: dict[str, np.ndarray], gradients: dict[str, np.ndarray], mesh: str = "", rank: int = 0, **more
) -> Recording:
    """Make a recording of one step, and of one micro-batch whose gradient it is."""
    axes = read_mesh(mesh) if mesh else {}
    gradient = np.concatenate([np.ravel(gradients[name]) for name in weights])
    start = np.concatenate([np.ravel(value) for value in weights.values()])
    micro_step = MicroStep(gradient, True, False, False, part=gradient, length=float(np.linalg.norm(gradient)))
    step = Step(
        gradient, gradient, -gradient, [0.1], 0, [dataclasses.replace(micro_step, **more.pop("micro_step", {}))]
    )
    return Recording(
        num_processes=max(1, int(np.prod(list(axes.values()) or [1]))),
        process_index=rank,
        names=list(weights),
        shapes=[list(value.shape) for value in weights.values()],
        sizes=[value.size for value in weights.values()],
        weights=start,
        signs=np.sign(start),
        steps=[dataclasses.replace(step, **more)],
        axes=axes,
        places=find_places(axes, rank) if axes else {},
    )


def cut(values: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """Cut matrices over two tensor parallel processes, as Megatron does."""
    rows = slice(4 * rank, 4 * rank + 4)
    return values | {"up": values["up"][rows], "bias": values["bias"][rows], "down": values["down"][:, rows]}


@pytest.fixture
def model() -> tuple[dict, dict]:
    """Weights and gradients of the whole model."""
    random = np.random.default_rng(1)
    return draw_weights(), {name: random.normal(size=shape) for name, shape in SHAPES.items()}


def find_causes(reference: Recording, *processes: Recording) -> list[str]:
    return [finding.cause for finding in compare([reference], list(processes), TOLERANCE).findings]


def test_parts_are_put_together(model):
    whole = record(*model)
    parts = [record(cut(model[0], rank), cut(model[1], rank), "tp=2", rank) for rank in range(2)]
    (merged,), said = put_together([whole], parts)
    assert said == []
    assert np.array_equal(merged.steps[0].gradient, whole.steps[0].gradient)
    assert merged.cuts == [[], [], ["tp"], ["tp"], ["tp"], []]
    assert merged.num_processes == 1  # none has samples of its own
    assert find_causes(whole, *parts) == []


def test_stages_may_number_their_layers_anew_and_norms_of_ones_follow_their_neighbours(model):
    """Each stage has a norm of ones called `0`; the place behind the weight before tells which one it is."""
    weights, gradients = model
    stages = (["words", "norm", "up", "bias"], ["down", "last"])
    parts = [
        record(
            {str(n): weights[name] for n, name in enumerate(names)},
            {str(n): gradients[name] for n, name in enumerate(names)},
            "pp=2",
            rank,
        )
        for rank, names in enumerate(stages)
    ]
    assert find_causes(record(*model), *parts) == []


def test_rows_of_fused_matrices_are_found_one_by_one(model):
    weights, gradients = model
    rows = [np.array([0, 1, 4, 5]), np.array([2, 3, 6, 7])]
    parts = [
        record(
            weights | {"up": weights["up"][r], "bias": weights["bias"][r]},
            gradients | {"up": gradients["up"][r], "bias": gradients["bias"][r]},
            "tp=2",
            rank,
        )
        for rank, r in enumerate(rows)
    ]
    assert find_causes(record(*model), *parts) == []


@pytest.mark.parametrize("num_processes", [2, 3])
def test_flat_pieces_are_found_with_their_padding(model, num_processes):
    """A flat parameter of the last ones first, padded with zeros to a multiple of the processes."""
    whole, order = record(*model), ["down", "last", "words", "norm", "up", "bias"]
    flat = [np.concatenate([np.ravel(values[name]) for name in order]) for values in model]
    padding = -len(flat[0]) % num_processes
    weights, gradients = (np.split(np.pad(value, (0, padding)), num_processes) for value in flat)
    parts = [
        record({"flat": w}, {"flat": g}, f"dp={num_processes}", n)
        for n, (w, g) in enumerate(zip(weights, gradients, strict=True))
    ]
    merged, said = put_together([whole], parts)
    assert said == []
    assert len(merged) == num_processes
    assert all(np.array_equal(part.steps[0].gradient, whole.steps[0].gradient) for part in merged)


def test_parts_of_no_whole_and_wholes_with_a_hole_are_said(model):
    whole = record(*model)
    strange = [
        record(cut(draw_weights(), rank) | {"up": np.full((4, 4), 7.0)}, cut(model[1], rank), "tp=2", rank)
        for rank in (0, 1)
    ]
    comparison = compare([whole], strange, TOLERANCE)
    assert [(finding.cause, finding.where) for finding in comparison.findings] == [("parameters", "up of process 0")]
    assert not comparison.is_exact
    halves = [record(cut(model[0], 0), cut(model[1], 0), "tp=2", rank) for rank in range(2)]
    (finding,) = compare([whole], halves, TOLERANCE).findings
    assert (finding.cause, finding.evidence) == ("parameters", "no process has all of it")
    large = [record(cut(model[0], rank), cut(model[1], rank), "tp=2", rank) for rank in range(2)]
    large = [
        dataclasses.replace(part, shapes=[[4000, 4000] if s == [4, 4] else s for s in part.shapes]) for part in large
    ]
    (finding,) = compare([whole], large, TOLERANCE).findings
    assert "make the model smaller" in finding.evidence


def test_replicas_that_differ_are_not_reduced(model):
    whole, halves = record(*model), []
    for rank, share in enumerate((0.3, 0.7)):
        gradients = cut(model[1], rank)
        halves.append(record(cut(model[0], rank), gradients | {"last": gradients["last"] * share}, "tp=2", rank))
    (finding,) = compare([whole], halves, TOLERANCE).findings
    assert (finding.cause, finding.where) == ("not_reduced", "last, step 1")
    assert "along tp" in finding.evidence
    assert finding.evidence.endswith("their sum is the reference's gradient")


@pytest.mark.parametrize(
    ("mesh", "names", "factor", "cause"),
    [
        ("tp=2", list(SHAPES), 2, "times_tensor_parallel"),
        ("tp=2", ["last", "norm"], 0.5, "times_tensor_parallel"),
        ("cp=2", list(SHAPES), 0.5, "times_sequence_parallel"),
        ("ep=2", ["up", "bias", "down"], 2, "times_expert_parallel"),
        ("tp=2", list(SHAPES), 3, "factor"),
    ],
)
def test_sizes_of_dimensions_are_factors(model, mesh, names, factor, cause):
    wrong = {name: value * (factor if name in names else 1) for name, value in model[1].items()}
    is_cut = mesh != "cp=2"
    parts = [
        record(cut(model[0], rank) if is_cut else model[0], cut(wrong, rank) if is_cut else wrong, mesh, rank)
        for rank in range(2)
    ]
    assert find_causes(record(*model), *parts) == [cause]


def test_a_norm_that_is_only_printed_leaves_the_step_exact(model):
    """A right one beside it is reason enough to say nothing; a right one that clipping returns is not."""
    whole = record(*model)
    true_norm = float(np.linalg.norm(whole.steps[0].gradient))
    shared = sum(float(np.sum(model[1][name] ** 2)) for name in ("words", "norm", "last"))
    wrong, lines = (true_norm**2 + shared) ** 0.5, ["train.py, line 7"]

    def find(numbers: list[float], returned: list[float]) -> list:
        seen = {"numbers": numbers, "lines": lines * len(numbers), "returned": returned}
        parts = [record(cut(model[0], rank), cut(model[1], rank), "tp=2", rank, **seen) for rank in range(2)]
        comparison = compare([whole], parts, TOLERANCE)
        assert comparison.is_exact
        return comparison.findings

    (finding,) = find([3.5, wrong], [])
    assert finding.cause == "norm_counts_replicas"
    assert "train.py, line 7" in finding.evidence
    assert find([wrong**2], [true_norm])[0].cause == "norm_counts_replicas"
    length = float(np.linalg.norm(np.concatenate([np.ravel(v) for v in cut(model[1], 0).values()])))
    assert find([length], [true_norm])[0].cause == "norm_of_a_part"
    assert find([wrong, true_norm], []) == find([true_norm], []) == find([1.0], []) == []


def test_experts_may_share_samples_or_have_their_own(model):
    for samples, number in ((([0, 1], [2, 3]), 2), (([0, 1], [0, 1]), 1)):
        parts = [
            record(cut(model[0], rank), cut(model[1], rank), "ep=2", rank, micro_step={"samples": own})
            for rank, own in enumerate(samples)
        ]
        assert len(put_together([record(*model)], parts)[0]) == number


def test_tensor_parallel_processes_with_other_samples_are_told(model):
    parts = [
        record(cut(model[0], rank), cut(model[1], rank), "tp=2", rank, micro_step={"samples": [rank]})
        for rank in range(2)
    ]
    assert [finding.cause for finding in put_together([record(*model)], parts)[1]] == ["other_samples"]


def test_parts_without_a_gradient_are_said_unless_they_are_frozen(model):
    gradients = model[1] | {"up": np.zeros((8, 4)), "bias": np.zeros(8)}
    whole = record(model[0], gradients)
    parts = [record(cut(model[0], rank), cut(gradients, rank), "tp=2", rank) for rank in range(2)]
    comparison = compare([whole], parts, TOLERANCE)
    assert [(f.cause, f.where, f.is_harmless) for f in comparison.findings] == [("dead_part", "up, bias", True)]
    assert find_dead_parts(dataclasses.replace(whole, frozen=["up", "bias"]), whole) == []


def test_a_mesh_that_one_process_alone_has_is_left_out(model):
    """As one that a library has made, and that is gone elsewhere when the first model is called."""
    parts = [record(cut(model[0], rank), cut(model[1], rank), "tp=2", rank) for rank in range(2)]
    parts[0] = dataclasses.replace(parts[0], axes={"tp": 2, "fsdp": 1}, places={"tp": 0, "fsdp": 0})
    assert find_causes(record(*model), *parts) == []
    parts[1] = dataclasses.replace(parts[1], axes={"tp": 2, "dp": 2}, places={"tp": 1, "dp": 0})
    assert find_causes(record(*model), *parts) == []


def test_processes_that_have_the_whole_model_are_left_as_they_are(model):
    parts = [record(*model), record(*model)]
    assert put_together([record(*model)], parts) == (parts, [])


# ---------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("dp=2,xx=2", "'xx' is no kind of parallelism: dp, tp, cp, ep, pp"),
        ("dp2", "not NAME=SIZE"),
        ("tp=2,tp=2", "each name once"),
        ("tp=0", "not NAME=SIZE"),
        ("tp=1", "has 1 processes, must have 2 to 64"),
        ("dp=9,tp=9", "has 81 processes, must have 2 to 64"),
    ],
)
def test_a_mesh_that_is_none_is_refused(mesh, message):
    with pytest.raises(UsageError, match=message):
        audit_script(["--vary", "batch=4", "--mesh", mesh, "--", str(AUDITED / "logged_loss.py")])


def test_a_mesh_is_not_resumed():
    words = ["--vary", "batch=4", "--mesh", "tp=2", "--resume", "a={folder}"]
    with pytest.raises(UsageError, match="leave one of them out"):
        audit_script([*words, "--", str(AUDITED / "logged_loss.py")])


def test_flags_are_divided_by_the_data_alone(capsys):
    """And the reference is recorded whole, as the parts are."""
    runs = []

    def run_program(program, variation, *more):
        runs.append((str(variation), variation.environment.get("STEPAUDIT_MESH")))
        raise UsageError("enough")

    words = ["--vary", f"{corpus.BATCH}=8", "--mesh", "dp=2,tp=2", "--mesh", "tp=2"]
    with pytest.raises(UsageError):
        audit_script([*words, "--", str(AUDITED / "logged_loss.py")], run_program=run_program)
    assert runs == [("b 8, N 1", "")]
    assert count_data_parts(read_mesh("dp=2,tp=2")) == 2


@pytest.mark.distributed
def test_a_program_of_two_stages_by_the_command(server, capsys):
    """The one word of the command that a program without a DeviceMesh needs."""
    flags = f"{corpus.BATCH}=8,{corpus.WINDOW}=2"
    path = AUDITED / "faults" / "pipeline_divides_in_every_window.py"
    code = audit_script(["--vary", flags, "--mesh", "pp=2", "--json", "--", str(path)], run_program=server.record)
    (comparison,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (code, comparison["layout"]) == (1, "b 8, k 2, pp=2")
    assert [finding["cause"] for finding in comparison["findings"]] == ["changed_between"]
