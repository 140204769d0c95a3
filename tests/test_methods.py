"""What fits on some hardware: models, methods, lengths; and the remedies where a recipe does not fit."""

import json

import pytest
from cases import keep

from samestep import cli
from samestep.errors import UsageError, exit_code
from stepplan.hardware import parse
from stepplan.methods import LENGTHS, METHODS, find_models, find_remedies, load_models, make_model_workload
from stepplan.placement import place

MODELS = load_models()


def test_models_rise():
    sizes = [shape.num_parameters for shape in MODELS.values()]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("hardware", keep(["1x3090", "8xh100", "1xm4-max", "1xt4"], ["1xm4-max"]))
def test_the_longest_samples_fit_and_the_next_do_not(hardware):
    machine = parse(hardware)
    fits, others = find_models(machine)
    assert {fit.model for fit in fits} | set(others) == set(MODELS)
    assert not {fit.model for fit in fits} & set(others)
    for fit in fits:
        assert fit.typical.fits
        assert fit.longest.fits
        length = fit.longest.workload.model.length
        longer = 2 * length
        if longer <= min(MODELS[fit.model].max_length or longer, LENGTHS[-1]):
            workload = make_model_workload(fit.model, longer, 64, fit.method.changes)
            with pytest.raises(UsageError):
                place(workload, machine)


def test_a_method_is_listed_where_it_helps():
    """Here for longer samples, or for models that fit with it only."""
    fits, _ = find_models(parse("1x3090"))
    by_model = {}
    for fit in fits:
        by_model.setdefault(fit.model, []).append(fit)
    for first, *others in by_model.values():
        for other in others:
            lengths = [each.longest.workload.model.length for each in (first, other)]
            speeds = [each.typical.time.total for each in (first, other)]
            assert lengths[0] < lengths[1] or speeds[0] > 1.05 * speeds[1]
    only = [found[0].method for found in by_model.values() if found[0].method is not METHODS[0]]
    assert METHODS[3] in only
    folded = make_model_workload("Qwen/Qwen3-0.6B", 512, 64, METHODS[2].changes)
    assert (folded.gradient_bytes, folded.second_moment) == (0, "unbiased")


@pytest.mark.parametrize("methods", [METHODS, METHODS[::-1]])
def test_remedies_are_sorted_by_time(methods):
    """Whatever the order of the methods; other hardware comes last, with the steps as they are."""
    machine = parse("1x4070ti")

    def make(changes):
        fields = dict(changes)
        return make_model_workload("Qwen/Qwen2.5-0.5B", fields.pop("max_seq_length", 8192), 8, fields)

    remedies = find_remedies(make({}), machine, make, "max_seq_length", methods)
    here = [remedy for remedy in remedies if remedy.changes]
    assert here == remedies[: len(here)]
    assert {"max_seq_length"} in [set(remedy.changes) for remedy in here]
    assert len(here) >= 3
    times = [remedy.seconds_per_unit for remedy in here]
    assert times == sorted(times)
    assert all(remedy.placement.fits for remedy in remedies)
    assert all(remedy.placement.workload == make({}) for remedy in remedies[len(here) :])


def test_an_unknown_field_is_refused():
    with pytest.raises(UsageError, match="unknown key 'nosuch'"):
        make_model_workload("Qwen/Qwen3-0.6B", 512, 64, {"nosuch": 3})


def run(capsys, line: str) -> str:
    assert exit_code(lambda: cli.main(line.split())) == 0
    return capsys.readouterr().out


def test_the_command(capsys):
    answer = json.loads(run(capsys, "plan --what-fits 4xl4 --price_per_hour 0.7 --seq_len 1024 --json"))
    assert {row["typical"]["length"] for row in answer["rows"]} == {1024}
    for row in answer["rows"]:
        cost, speed = row["typical"]["cost_per_billion_tokens"], row["typical"]["tokens_per_second"]
        assert cost == pytest.approx(4 * 0.7 / 3600 * 1e9 / speed)
    text = run(capsys, "plan --what_fits 4xl4 --price_per_hour 0.7 --seq_len 1024")
    assert [line.split()[0] for line in text.splitlines() if "/" in line.split(" ")[0]] == [
        row["model"] for row in answer["rows"]
    ]
    assert answer["command"].endswith("--write_recipe mine.yaml --write_config launch.yaml")
    largest = max(answer["rows"], key=lambda row: row["num_parameters"])
    assert largest["model"] in answer["command"]
    assert f"To plan {largest['model']} by {largest['method']}, with" in " ".join(text.split())
    # The command is of the method that is named
    assert largest["method"].startswith("LoRA")
    assert "--base_quantization" not in answer["command"]


def test_the_proposed_command_works(monkeypatch, capsys, tmp_path):
    """As it is printed; it fits in the same memory, and writes both files."""
    monkeypatch.chdir(tmp_path)
    answer = json.loads(run(capsys, "plan --what_fits 1x3090 --html fits.html --json"))
    assert (tmp_path / "fits.html").read_text(encoding="utf-8").count("<tr>") == 1 + len(answer["rows"])
    planned = json.loads(run(capsys, f"plan {answer['command'].split('plan ')[1]} --json"))
    assert planned["memory_needed"] in [row["typical"]["memory_needed"] for row in answer["rows"]]
    assert (tmp_path / "mine.yaml").is_file()
    assert (tmp_path / "launch.yaml").is_file()


def test_nothing_fits(capsys):
    tiny = run(capsys, "plan --what_fits 1xcpu --seq_len 131072")
    assert "None of the models" in tiny
