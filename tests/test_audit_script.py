"""The audit names the one fault of each program in audited/, and finds none in those that have none."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import corpus
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from cases import thorough
from common import ROOT, fresh_accelerator, python_path
from waiting import PATIENCE

from stepaudit.errors import UsageError
from stepaudit.interview import honours_num_items
from stepaudit.judge import CAUSES, HARMLESS, Comparison, Finding, compare, find_faults
from stepaudit.random_projection import EXACT_SIZE, sketch
from stepaudit.record import EnoughSteps, Recorder
from stepaudit.recording import Recording
from stepaudit.script import Variation, audit_script, make_variations, record
from stepaudit.table import table, write_remedy

AUDITED = ROOT / "tests" / "audited"
TOLERANCE = 1e-7
PROGRAMS = corpus.programs()


def program(name: str):
    return next(program.path for program in PROGRAMS if program.path.stem == name)


@pytest.fixture
def run(monkeypatch):
    """Give run(name, b, k), which records a program in this process."""
    monkeypatch.syspath_prepend(str(AUDITED))

    def record_here(name: str | Path, b: int, k: int, num_steps: int | None = None) -> list[Recording]:
        fresh_accelerator()
        module, path = types.ModuleType("__main__"), name if isinstance(name, Path) else program(name)
        module.__file__ = str(path)
        flags = ["--per_device_train_batch_size", str(b), "--gradient_accumulation_steps", str(k)]
        monkeypatch.setattr(sys, "argv", [str(path), *flags])
        recorder = Recorder(num_steps)
        try:
            with recorder:
                exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
        except EnoughSteps:
            assert num_steps is not None
        return [recorder.recording]

    return record_here


@pytest.mark.distributed
@pytest.mark.parametrize(
    "program", [thorough(program) if program.is_thorough else program for program in PROGRAMS], ids=str
)
def test_faults_are_named_and_what_is_sound_is_not_accused(server, program):
    """The last layout with each cause, of faults on one process and on several; `make bench NAME=verdicts` takes all."""
    layouts = {
        (layout[2] > 1 and cause != corpus.EXACT, cause): layout for layout, cause in program.expected.items()
    }.values()
    reference = server.record([str(program.path)], corpus.variation(program.reference, program.mesh))
    assert not [
        finding for finding in find_faults(reference) if finding.cause not in program.also | set(program.causes)
    ]
    for layout in layouts:
        comparison = corpus.audit(server, program, reference, layout)
        verdict = corpus.verdict(program, layout, comparison)
        if program.is_open:
            assert verdict != "false alarm", comparison.findings
            continue
        assert verdict == "right", comparison.findings
        assert comparison.is_exact == (program.expected[layout] in {corpus.EXACT} | HARMLESS)


def test_what_is_thorough_leaves_every_cause():
    """Of each cause a program is always taken."""
    taken, left_out = (
        {c for each in PROGRAMS if is_left_out == each.is_thorough and not each.is_open for c in each.expected.values()}
        for is_left_out in (False, True)
    )
    assert left_out <= taken


def test_two_faults_at_once(run):
    """As documented, Accelerate also divides the last window's 7 micro-batches by 8."""
    findings = compare(run("accelerate_documented", 16, 1), run("accelerate_documented", 2, 8), TOLERANCE).findings
    assert [finding.cause for finding in findings] == ["mean_of_means", "tail"]
    assert (findings[1].where, findings[1].evidence) == ("step 5", "7 micro-batches are divided by 8")


def test_evidence_and_places(run):
    """The module, the factor, the counts."""
    findings = {}
    for name in ("batch_norm", "not_divided_by_k", "mean_of_means", "trainer_bert_classifier", "tail_divided_by_k"):
        findings[name], *others = compare(run(name, 16, 1), run(name, 4, 4), TOLERANCE).findings
        assert [(finding.cause, finding.evidence.split(": ")[-1]) for finding in others] == (
            [("logged_loss", "k times")] if name == "trainer_bert_classifier" else []
        )
    assert findings["batch_norm"].where == "1 (BatchNorm1d)"
    assert findings["not_divided_by_k"].evidence == "4 = k times the gradient"
    assert findings["mean_of_means"].evidence.startswith(
        "targets of the micro-batches: 48, 40, 38, 57; they need the weights 1.0"
    )
    assert findings["trainer_bert_classifier"].where == "BertForSequenceClassification, step 1"
    assert findings["trainer_bert_classifier"].evidence == "4 times the gradient"
    assert findings["tail_divided_by_k"].evidence == "0.5 = 2/4 of the gradient"
    assert str(findings["batch_norm"]).startswith(CAUSES["batch_norm"])


def test_a_recording_is_written_and_read(run, tmp_path):
    (recording,) = run("trainer_bert_classifier", 4, 4, num_steps=2)
    assert len(recording.steps) == 2
    assert not recording.unfinished_micro_steps
    recording.save(tmp_path / "0.npz")
    copy = Recording.load(tmp_path / "0.npz")
    assert np.array_equal(copy.steps[1].micro_steps[3].gradient, recording.steps[1].micro_steps[3].gradient)
    assert str(copy) == str(recording)
    assert copy.steps[0].micro_steps[1].samples == [4, 5, 6, 7]


def test_parameters_are_kept_so_that_steps_are_compared_one_by_one():
    """The first step's error must not be seen in the last one."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    initial_weight = model.weight.detach().clone()
    for recorder, moves in ((Recorder(), False), (Recorder(keep_parameters=False), True)):
        with recorder:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        assert model.weight.equal(initial_weight) != moves
        assert len(recorder.recording.steps) == 1


def test_nothing_is_left_behind(run):
    originals = torch.autograd.backward, torch.nn.Module.__call__, torch.optim.lr_scheduler.LRScheduler.step
    run("scheduler_per_step", 4, 4)
    assert originals == (torch.autograd.backward, torch.nn.Module.__call__, torch.optim.lr_scheduler.LRScheduler.step)


def test_numbers_that_are_not_finite_and_other_models(run):
    reference, broken = run("groupnorm", 16, 1), run("groupnorm", 4, 4)
    broken[0].steps[2].gradient[5] = np.nan
    comparison = compare(reference, broken, TOLERANCE)
    assert [(finding.cause, finding.where) for finding in comparison.findings] == [("not_finite", "step 3")]
    other = compare(reference, run("two_terms", 4, 4), TOLERANCE)
    assert [finding.cause for finding in other.findings] == ["parameters"]
    v = Variation({}, 1)
    assert "not compared" in table([v, v], [], [other])


def test_the_table_shows_the_numbers():
    leak, tail = Finding("leak", "step 2", "norm 1"), Finding("tail", "step 3", "2/4")
    comparisons = [
        Comparison([1e-9, 0.5], [1.0, 2.0], [1.0, 0.5], [1e-9, 0.25], [0, 0], "a.weight", 0.4, [leak, tail]),
        Comparison([2e-9], [1.0], [1.0], [3e-9], [0], "a.weight", 2e-9, []),
        Comparison([0.1], [1.0], [1.0], [0.1], [0], "b", 0.1, [Finding("tail", "step 9", "7/8")]),
    ]
    heading, reference, first, second, third, *causes = table("rxyz", [leak], comparisons).splitlines()
    assert reference.split() == "r the reference [1]".split()
    assert first.split() == "x 2 1e-09, 0.5 1 1.0000 0.25 a.weight 0.4 [1] [2]".split()
    assert second.split() == "y 1 2e-09, 2e-09 1 1.0000 3e-09".split()
    assert third.split()[-3:] == ["b", "0.1", "[2]"]
    numbers = [f"[2] {CAUSES['tail']}", "    x: step 3: 2/4", "    z: step 9: 7/8"]
    assert causes == [f"[1] {leak}", *write_remedy(leak.remedy), *numbers, *write_remedy(tail.remedy)]
    assert heading.index("loss error") + len("loss error") == first.index("0.25") + len("0.25")


def test_a_cause_is_explained_once_with_the_numbers_of_each_layout():
    """Of layouts that share them in one line; a place that all share is said once, and so is a cause of the reference."""

    def explain(*rows: tuple[str, str], of_reference: tuple[Finding, ...] = ()) -> list[str]:
        findings = [Finding("factor", *row) for row in rows]
        comparisons = [Comparison([1.0], [1.0], [1.0], [1.0], [0], "a", 1.0, [finding]) for finding in findings]
        return table("rxyz", list(of_reference), comparisons, [1e-7, 1e-5, 1e-5]).splitlines()[5:]

    text, do = CAUSES["factor"], write_remedy(Finding("factor", "", "").remedy)
    assert [line[:7] for line in do] == ["    do:", "    or,"]
    same = ("step 1", "4 = k")
    assert explain(same, same, same) == [f"[1] {text}: step 1: 4 = k", *do]
    assert explain(same, ("step 1", "8 = k"), same) == [f"[1] {text}: step 1", "    x; z: 4 = k", "    y: 8 = k", *do]
    other = ("a.weight, step 1", "2 = N")
    assert explain(same, other, ("", "3")) == [
        f"[1] {text}",
        "    x: step 1: 4 = k",
        "    y: a.weight, step 1: 2 = N",
        "    z: 3",
        *do,
    ]
    by_itself = (Finding("factor", "step 2", "4 = k"),)
    assert explain(same, same, same, of_reference=by_itself)[:3] == [
        f"[1] {text}",
        "    r: step 2: 4 = k",
        "    x; y; z: step 1: 4 = k",
    ]


def test_processes_that_take_different_gradients(run):
    first, second = run("groupnorm", 16, 1)[0], run("groupnorm", 16, 1)[0]
    second.process_index = 1
    assert not [finding for finding in find_faults([first, second]) if finding.cause == "not_reduced"]
    second.steps[1].gradient *= 1.5
    assert [(finding.cause, finding.where) for finding in find_faults([first, second])] == [
        ("not_reduced", "step 2, process 1")
    ]


def test_rates_and_steps_that_depend_on_the_layout(run):
    reference, other = run("groupnorm", 16, 1), run("groupnorm", 4, 4)
    other[0].steps[2].learning_rates = [0.5 * rate for rate in other[0].steps[2].learning_rates]
    del other[0].steps[3:]
    findings = [
        (finding.cause, finding.where, finding.evidence) for finding in compare(reference, other, TOLERANCE).findings
    ]
    assert findings == [("num_steps", "", "3, not 5"), ("learning_rate", "step 3", "0.005, not 0.01")]


def test_samples_whose_contents_are_drawn_anew_are_told_by_their_indices(run):
    """As TRL's KTO pairs completions anew in every batch."""
    reference, other = run("groupnorm", 16, 1), run("groupnorm", 4, 4)
    for step in other[0].steps:
        for micro_step in step.micro_steps:
            micro_step.digests = [f"another {digest}" for digest in micro_step.digests]
    last = other[0].steps[-1]
    last.gradient, last.unclipped_gradient = 2 * last.gradient, 2 * last.unclipped_gradient
    last.micro_steps[-1].samples += [0, 1]
    last.micro_steps[-1].digests += ["another one", "another two"]
    (finding,) = compare(reference, other, TOLERANCE).findings
    assert (finding.cause, finding.where, finding.evidence) == ("duplicated", "step 5", "2 more than once: 0, 1")


def test_a_last_window_that_steps_in_the_next_epoch(run, tmp_path):
    """The samples of each later step are early then; none is used twice."""
    lines = program("last_window_never_steps").read_text().splitlines()
    loop = next(number for number, line in enumerate(lines) if line.startswith("for i, "))
    path = tmp_path / "epochs.py"
    path.write_text("\n".join([*lines[:loop], "for epoch in range(2):", *(f"    {line}" for line in lines[loop:])]))
    (finding,) = compare(run(path, 16, 1), run(path, 4, 4), TOLERANCE).findings
    evidence = "its micro-batches are of 2 epochs"
    assert (finding.cause, finding.where, finding.evidence) == ("last_window", "step 5", evidence)


def test_a_last_step_that_is_left_out(run):
    reference, other = run("groupnorm", 16, 1), run("groupnorm", 4, 4)
    del other[0].steps[-1]
    (finding,) = compare(reference, other, TOLERANCE).findings
    assert (finding.cause, finding.where, finding.evidence) == (
        "dropped",
        "step 5",
        "13 samples, too few for a whole step",
    )


def test_another_update_of_the_same_gradient(run):
    """Nothing is said of the optimizer where the gradients or the rates that it was given differ."""
    reference, other = run("groupnorm", 16, 1), run("groupnorm", 4, 4)
    other[0].steps[1].change *= 1.05
    assert compare(reference, other, TOLERANCE).is_exact
    other[0].steps[1].change *= 2
    comparison = compare(reference, other, TOLERANCE)
    assert [(finding.cause, finding.where) for finding in comparison.findings] == [("update", "step 2")]
    assert comparison.update_errors[1] == pytest.approx(1.1)
    other[0].steps[1].learning_rates[0] *= 2
    assert [finding.cause for finding in compare(reference, other, TOLERANCE).findings] == ["learning_rate"]


def test_losses_that_a_program_logs(run):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder() as recorder:
        for factor in (1, 2):
            for _ in range(2):
                accelerator.backward(model(torch.ones(2, 3)).sum() / 2)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": factor * sum(m.loss for m in recorder.recording.steps[-1].micro_steps), "x": 1})
    (finding,) = compare([recorder.recording], [recorder.recording], TOLERANCE).findings
    assert (finding.cause, finding.where) == ("logged_loss", "step 2")
    assert finding.evidence.endswith(": k times")
    assert compare([recorder.recording], [recorder.recording], TOLERANCE).is_exact


def test_a_micro_step_that_counts_twice(run):
    reference, other = run("groupnorm", 16, 1), run("groupnorm", 4, 4)
    other[0].steps[0].gradient = other[0].steps[0].gradient + other[0].steps[0].micro_steps[0].gradient
    (finding,) = compare(reference, other, TOLERANCE).findings
    assert (finding.cause, finding.evidence) == ("changed_between", "micro-batches are weighted by 2, 1, 1, 1")


def test_modules_that_do_nothing_are_no_suspects():
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2).eval(), torch.nn.Dropout(0.5).eval(), torch.nn.Dropout(0.0)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder() as recorder:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert recorder.recording.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert recorder.recording.batch_norms == recorder.recording.dropouts == []


def test_asking_a_loss_about_num_items_leaves_no_trace():
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(1)

        def forward(self, x, num_items_in_batch):
            return types.SimpleNamespace(loss=self.norm(x).sum() * 0 + torch.rand(()) / num_items_in_batch)

    state, model = torch.get_rng_state(), Noisy()
    assert honours_num_items(model, (), {"x": torch.ones(3, 1), "num_items_in_batch": torch.tensor(4)})
    assert torch.get_rng_state().equal(state)
    assert (model.norm.running_mean.item(), model.norm.num_batches_tracked.item()) == (0, 0)


@pytest.mark.parametrize("order", ["halves", "turns"])
def test_the_rows_of_a_pair_are_one_sample(order):
    """A loss that compares the two rows of each pair mixes no samples; one that compares pairs does."""
    pairs = list(zip(*torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(1)), strict=True))

    def collate(samples):
        chosen, rejected = map(torch.stack, zip(*samples, strict=True))
        return torch.cat([chosen, rejected]) if order == "halves" else torch.stack([chosen, rejected], 1).flatten(0, 1)

    def ask(compare_pairs: bool) -> list:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder() as recorder:
            for rows in torch.utils.data.DataLoader(pairs, batch_size=4, collate_fn=collate):
                scores = model(rows).squeeze(1)
                scores = scores.view(2, -1).T if order == "halves" else scores.view(-1, 2)
                margins = scores[:, 0] - scores[:, 1]
                loss = torch.nn.functional.softplus(-margins).mean()
                (loss + margins.var() if compare_pairs else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
        return recorder.recording.facts

    assert ask(compare_pairs=False) == []
    assert [cause for cause, _ in ask(compare_pairs=True)] == ["mixed_loss"]


def test_a_multiple_of_the_gradient_is_not_put_down_to_batch_norm(run):
    reference, other = run("trainer_bert_classifier", 16, 1), run("trainer_bert_classifier", 4, 4)
    other[0].batch_norms = ["somewhere"]
    causes = {finding.cause for finding in compare(reference, other, TOLERANCE).findings}
    assert causes == {"ignores_num_items", "logged_loss"}


@pytest.mark.parametrize("size", [EXACT_SIZE, EXACT_SIZE + 1, 40 * EXACT_SIZE + 7])
def test_a_sketch_is_linear_and_keeps_lengths(size):
    a, b = torch.randn(2, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sketch_a, sketch_b, sketch_sum = (sketch([tensor], [a]) for tensor in (a, b, 3 * a - b))
    assert len(sketch_a) == min(size, EXACT_SIZE)
    assert torch.allclose(3 * sketch_a - sketch_b, sketch_sum, atol=1e-12)
    assert sketch_a.norm().item() == pytest.approx(a.norm().item(), rel=0.1)
    assert (sketch_a @ sketch_b / sketch_a.norm() / sketch_b.norm()).abs() < 0.1
    assert sketch([None], [a]).equal(torch.zeros_like(sketch_a))


# ---------------------------------------------------------------------------------------------------- the command

VARY = ["--vary", "per_device_train_batch_size=16,gradient_accumulation_steps=1"]
VARY += ["--vary", "per_device_train_batch_size=4,gradient_accumulation_steps=4"]


def command(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "recipes", "audit-script", *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": python_path(AUDITED)},
    )


def test_the_command_says_what_is_wrong_and_exits_with_1():
    process = command(*VARY, "--steps", "2", "--", str(program("not_divided_by_k")))
    assert process.returncode == 1, process.stderr
    lines = process.stdout.splitlines()
    assert lines[1] == "b 16, k 1, N 1  the reference"
    assert lines[2].startswith("b 4, k 4, N 1       2 ")
    assert lines[2].endswith(" [1]")
    assert lines[3].startswith("[1] the gradient is too large")
    assert lines[3].endswith("step 1: 4 = k times the gradient")
    assert lines[4:6] == write_remedy(Finding("factor", "", "").remedy)
    assert lines[6] == "NOT exact (tolerance 1e-05)"


DIVIDED_TWICE = """
accelerator = Accelerator(gradient_accumulation_steps=args.accum)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = criterion(model(x), y) / args.accum
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_faults_of_the_lines_are_said_beside_those_that_hide_them(capsys, run, tmp_path):
    """A fault that the audit has named is not said twice."""
    train, said = tmp_path / "train.py", []
    texts = {"batch_norm": DIVIDED_TWICE, "accelerate_divided_twice": DIVIDED_TWICE, "not_divided_by_k": "pass"}
    for name, text in texts.items():
        train.write_text(text)
        audit_script(
            [*VARY, "--", str(train)],
            run_program=lambda _, v, *__, name=name: run(name, *map(int, v.flags.values()), 2),
        )
        said.append(capsys.readouterr().out.splitlines())
    *_, title, line, cure = said[0]
    assert title == "The lines of the program show more, which was not measured by itself (lint):"
    assert line.startswith(f"  {train}:6: SA102 the loss is divided by k here")
    assert cure == "    do: divide once: leave the division out"
    assert all(lines[-1].startswith("NOT exact (") for lines in said[1:])


TRIED = """
from itertools import islice
import torch
from common_models import flags, vectors
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
model = torch.nn.Linear(12, 5).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):  # does it run at all?
    model(torch.ones(2, 12, dtype=torch.float64)).sum().backward()
optimizer.zero_grad()
batches = iter(DataLoader(vectors(77), batch_size=b))
while window := list(islice(batches, k)):
    for x, y in window:
        (torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / 16).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("b", "k"), [(3, 6), (5, 3)])
def test_another_number_of_samples_is_named_and_nothing_else(run, tmp_path, b, k):
    """Steps of 18 or 15 samples, where the reference has 16; also of a program that tries its model before it trains."""
    (tmp_path / "tried.py").write_text(TRIED)
    for name in ("groupnorm", tmp_path / "tried.py"):
        comparison = compare(run(name, 16, 1), run(name, b, k), corpus.TOLERANCE)
        assert [finding.cause for finding in comparison.findings] == ["batch_size"], name
        assert comparison.findings[0].evidence == f"{b * k} samples, 16 in the reference"
        assert compare(run(name, 16, 1), run(name, 8, 2), corpus.TOLERANCE).is_exact


def test_the_command_for_machines(capsys, run):
    """And 0 for what is exact."""
    words = [*VARY, "--json", "--tolerance", "1e-9", "--", str(program("groupnorm"))]
    assert audit_script(words, run_program=lambda _, v, *__: run("groupnorm", *map(int, v.flags.values()))) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["is_exact"] is answer["comparisons"][0]["is_exact"] is True
    assert (answer["tolerance"], answer["findings"], answer["comparisons"][0]["findings"]) == (1e-9, [], [])


def test_flags_that_a_program_does_not_read_test_nothing(capsys, run):
    """Its numbers stand in its lines, as of a notebook: a comparison of it with itself is no verdict."""
    words = [*VARY, "--", str(program("not_divided_by_k"))]
    as_written = run("not_divided_by_k", 8, 2)
    with pytest.raises(
        UsageError, match=r"all micro-batches are as in the first layout \(the first step has 2, of 8 samples"
    ):
        audit_script(words, run_program=lambda *_: as_written)
    assert "exact" not in capsys.readouterr().out
    words[:0] = ["--vary", f"{corpus.BATCH}=8,{corpus.WINDOW}=2"]
    read = [(8, 2), (8, 2), (4, 4)]  # the second layout is not what its flags say
    with pytest.raises(UsageError, match="so that nothing is tested"):
        audit_script(words, run_program=lambda *_: run("groupnorm", *read.pop(0)))
    assert capsys.readouterr().out.splitlines()[-1].startswith("exact, but for what failed (")
    other = ["--vary", "num_workers=0", "--vary", "num_workers=2", "--", str(program("groupnorm"))]
    assert audit_script(other, run_program=lambda *_: run("groupnorm", 8, 2)) == 0


def test_processes_that_all_do_the_same_work_test_no_sharing(capsys, run):
    """A program that starts no process group takes the reference's steps on every process."""
    words = [*VARY, "--processes", "1,2", "--per_process", "none", "--", str(program("groupnorm"))]

    def record_copies(_, variation, *__):
        return run("groupnorm", *map(int, variation.flags.values())) * variation.num_processes

    with pytest.raises(
        UsageError, match="N 2: all processes compute the same samples, so that their sharing is not tested"
    ):
        audit_script(words, run_program=record_copies)
    assert capsys.readouterr().out.splitlines()[-1].startswith("exact, but for what failed (")
    with pytest.raises(UsageError, match="N 2: all processes compute the same samples"):
        audit_script([*words[:2], *words[4:]], run_program=record_copies)
    assert "exact" not in capsys.readouterr().out


def test_a_layout_that_fails_leaves_the_others_their_verdicts(capsys, run):
    """All that could be compared is said; then why the rest could not, and that is the end of it: not a verdict."""
    words = [*VARY, "--vary", f"{corpus.BATCH}=2,{corpus.WINDOW}=8", "--", str(program("not_divided_by_k"))]

    def record_all_but(failing: tuple[str, ...], name: str = "not_divided_by_k"):
        def record_one(_, variation, *__):
            if variation.flags[corpus.BATCH] in failing:
                raise UsageError(f"b {variation.flags[corpus.BATCH]} failed: it said why")
            return run(name, *map(int, variation.flags.values()))

        return record_one

    with pytest.raises(UsageError, match=r"^b 4 failed: it said why$"):
        audit_script(words, run_program=record_all_but(("4",)))
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("NOT exact (")
    assert "b 2, k 8, N 1" in said
    assert "b 4, k 4, N 1" not in said
    assert "8 = k times the gradient" in said
    words[-1] = str(program("groupnorm"))
    with pytest.raises(UsageError, match=r"^b 4 failed"):
        audit_script(words, run_program=record_all_but(("4",), "groupnorm"))
    assert capsys.readouterr().out.splitlines()[-1].startswith("exact, but for what failed (")
    with pytest.raises(UsageError, match=r"^b 4 failed"):
        audit_script(["--json", *words], run_program=record_all_but(("4",), "groupnorm"))
    assert json.loads(capsys.readouterr().out)["is_exact"] is False
    for failing in (("16",), ("4", "2")):  # nothing is left to compare
        with pytest.raises(UsageError, match=f"^b {failing[-1]} failed: it said why$"):
            audit_script(words, run_program=record_all_but(failing))
        assert "N 1  the reference" not in capsys.readouterr().out


def test_no_flag_is_of_a_process():
    flags = f"{corpus.BATCH}=16,{corpus.WINDOW}=2"
    runs = []

    def note(_, variation, *__):
        runs.append(variation.flags)
        raise UsageError("enough")

    for words, expected in (([], {corpus.WINDOW: "1"}), (["--per_process", "none"], {})):
        for processes in ("1", "2"):
            with pytest.raises(UsageError, match="enough"):
                audit_script(
                    [
                        "--vary",
                        flags,
                        "--vary",
                        flags,
                        "--processes",
                        processes,
                        *words,
                        "--",
                        str(program("groupnorm")),
                    ],
                    run_program=note,
                )
        assert runs[0] == {corpus.BATCH: "16", corpus.WINDOW: "2"}
        assert runs[1] == runs[0] | expected
        runs.clear()


def test_json_has_null_where_a_step_is_not_compared(capsys, run):
    name = "shuffles_per_layout"
    words = [*VARY, "--json", "--", str(program(name))]
    assert audit_script(words, run_program=lambda _, v, *__: run(name, *map(int, v.flags.values()))) == 1
    text = capsys.readouterr().out
    assert "NaN" not in text
    assert json.loads(text)["comparisons"][0]["errors"] == [None] * 5


def test_the_global_batch_is_the_same_on_every_number_of_processes():
    runs = make_variations(["per_device_train_batch_size=8,gradient_accumulation_steps=2", "x=1"], [1, 2, 4])
    assert [str(run) for run in runs] == [
        *("b 8, k 2, N 1", "b 8, k 1, N 2", "b 2, k 2, N 4"),
        *("x 1, N 1", "x 1, N 2", "x 1, N 4"),
    ]
    assert runs[0].argv == ["--per_device_train_batch_size=8", "--gradient_accumulation_steps=2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the program is missing behind --"),
        ([*VARY, "--", "NOTEBOOK.ipynb"], r"is a notebook: write its cells into a program .*, env:BATCH"),
        ([*VARY, "--", "nowhere.py"], "nowhere.py is not a file"),
        (["--", "README.md"], "one run has nothing to be compared with"),
        (["--vary", "x", "--", "README.md"], "--vary is 'x', not FLAG=VALUE"),
        ([*VARY, "--processes", "two", "--", "README.md"], "--processes is two, not numbers from 1 to 64 with commas"),
        (
            [*VARY, "--processes", "3", "--", "README.md"],
            r"gradient_accumulation_steps and per_device_\w+ cannot be divided by 3: give values .*--per_process FLAG",
        ),
        ([*VARY, "--steps", "-1", "--", "README.md"], r"--steps is -1, must be 0 \(all\) or more"),
        ([*VARY, "--tolerance", "-1", "--", "README.md"], "--tolerance is -1.0, must be 0 or more and below 1"),
        ([*VARY, "--tolerance", "nan", "--", "README.md"], "--tolerance is nan"),
        ([*VARY, "--timeout", "0", "--", "README.md"], "--timeout is 0.0, must be more than 0 seconds"),
        (
            [*VARY, "--what", "--", "README.md"],
            "unexpected '--what': valid names: .*; the program and its flags come after --",
        ),
        ([*VARY, "--per_process", "batch", "--", "README.md"], "--per_process batch is no flag of --vary"),
        ([*VARY, "--processes", "9" * 5000, "--", "README.md"], "not numbers from 1 to 64"),
        ([*VARY, "--", "README.md"], "README.md is no Python program: line"),
        ([*VARY, "--", "/dev/zero"], "/dev/zero is not a file"),
        ([*VARY, "--", "docs"], "docs is not a file"),
    ],
)
def test_bad_usage(argv, message, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    if argv[-1:] == ["NOTEBOOK.ipynb"]:
        argv = [*argv[:-1], str(tmp_path / "a.ipynb")]
        (tmp_path / "a.ipynb").write_text('{"cells": []}')
    with pytest.raises(UsageError, match=message):
        audit_script(argv)


def test_a_file_that_is_too_large_for_a_program(tmp_path):
    with (tmp_path / "large.py").open("wb") as file:
        file.truncate(2**40)  # zeros, which take no place
    with pytest.raises(UsageError, match=r"large\.py is no Python program: it has more than 16,777,216 bytes"):
        audit_script([*VARY, "--", str(tmp_path / "large.py")])


def test_a_program_that_fails_or_takes_no_step(tmp_path):
    file = tmp_path / "program.py"
    exit_text = "import sys; sys.exit('what it said')"
    silenced = "import builtins; builtins.print = lambda *_, **__: None"  # as on all processes but the first
    looks = "import os, sys; assert os.listdir(sys.argv[1]) == os.listdir(sys.argv[2].partition('=')[2]) == []; print('bye')"
    for text, message in (
        (f"{silenced}; raise KeyError('x')", "KeyError: 'x'"),
        (exit_text, "what it said"),
        (looks, r"ended without a step of an optimizer of torch.optim. It said at the end:\n  bye$"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            record([str(file), "{folder}"], Variation({"out": "{folder}"}, 1), 1, timeout=PATIENCE)
    file.write_text("import signal; signal.pause()")
    with pytest.raises(UsageError, match="took longer than 1 seconds"):
        record([str(file)], Variation({}, 1), 1, timeout=1)


@pytest.mark.distributed
def test_a_forked_call_that_fails_is_named(server, tmp_path):
    """As all tests see it that run something through a fork server."""
    with pytest.raises(RuntimeError, match=r"process 0 of 1 ended with 1:\n(.|\n)*TypeError: main\(\)"):
        server.run([str(tmp_path), "a", "word", "too", "many"], 1, module="run_wide")
