"""Verdicts follow from numbers, results are reused only if nothing changed, the document shows them."""

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

HOME = Path(__file__).parent
CHEAP = ["indicator", "division", "wells"]


@pytest.fixture(scope="module")
def claims():
    """The program's modules."""
    names = (
        "verdicts",
        "arithmetic",
        "quadratic",
        "moments",
        "systems",
        "training",
        "training_claims",
        "language",
        "asynchronous",
        "asynchronous_claims",
        "betas",
        "second_order",
        "small_batches",
        "report",
        "study",
    )
    with mock.patch.object(sys, "path", [str(HOME), *sys.path]):
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def tried(claims, tmp_path):
    """Run the program with tiny settings: everything of `CHEAP`, more arguments -> the document's text."""

    def run(*more: str, only: list[str] = CHEAP) -> str:
        document = tmp_path / "docs" / "claims.md"
        places = ["--results", str(tmp_path / "results"), "--document", str(document)]
        claims.study.main(["--quick", "--seeds", "2", "--only", *only, *places, *more])
        return document.read_text(encoding="utf-8")

    return run


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts


def test_the_verdict_counts_the_cases_that_hold(claims):
    v = claims.verdicts
    yes, no = v.so("this", "1", True), v.so("that", "2", False)
    assert v.Claim("a", (yes, yes)).verdict == "holds"
    assert v.Claim("a", (yes, no)).verdict == "holds under conditions"
    assert v.Claim("a", (yes, no)).conditions == "this"
    assert v.Claim("a", (no, no)).verdict == "does not hold"
    with pytest.raises(ValueError, match="without a case"):
        v.Claim("a", ())


def test_a_stated_number_holds_if_the_measured_one_rounds_to_it(claims):
    rounds = claims.verdicts.rounds
    assert rounds("", 5.4449, "5.44").holds
    assert not rounds("", 5.380, "5.44").holds
    assert rounds("", 35.4, "35").holds
    assert not rounds("", 35.6, "35").holds
    assert "0.00369" in rounds("", 0.00369, "0.001").measured


def test_a_difference_holds_beyond_two_standard_errors_and_in_its_direction_only(claims):
    less = claims.verdicts.less
    theirs = [1.0, 1.1, 0.9, 1.0, 1.05]
    for shift, holds in ((-0.1, True), (0.1, False)):
        noise = [0.01, -0.01, 0.02, -0.02, 0.0]
        ours = [value + shift + each for value, each in zip(theirs, noise, strict=True)]
        assert less("", ours, theirs).holds is holds
    unclear = less("", [0.5, 1.5, 0.6, 1.5, 0.9], theirs)
    assert not unclear.holds
    assert "no difference" in unclear.measured
    assert not less("", theirs, theirs).holds
    assert "other way round" in less("", [2.0, 2.1], [1.0, 1.2]).measured


def test_means_in_ranges_and_near_numbers(claims):
    v = claims.verdicts
    assert v.within("", [0.3, 0.5], 0.35, 0.45).holds
    assert not v.within("", [0.3, 0.5], 0.45, 0.6).holds
    assert v.near("", [1.0, 1.08], 1.0).holds
    assert not v.near("", [1.0, 1.2], 1.0).holds
    assert v.near("", [1.0, 1.2], 1.0, 0.2).holds
    assert not v.near("", [0.75], 1.0, 0.2).holds
    assert v.at_least("", [39.0, 41.0, 40.0], 41.0).holds
    assert not v.at_least("", [39.0, 39.1, 39.0], 41.0).holds
    assert v.equal("", [-1e-13, 0.0], 1e-12).holds
    assert not v.equal("", [-1e-11, 0.0], 1e-12).holds


def test_the_best_setting_is_chosen_without_the_seed_that_is_judged(claims):
    results = [{"1": 0.0, "2": 5.0}, {"1": 4.0, "2": 3.0}, {"1": 4.0, "2": 3.0}]
    assert claims.verdicts.at_best(results) == ([5.0, 4.0, 4.0], ["2", "1", "1"])  # of all seeds, "1" is best


def test_every_verdict_of_a_training_turns_with_its_numbers(claims):
    """Made-up runs in which sparse updates win, lose, or win at an unchanged rate only."""

    def verdict(sparse_same: float, sparse_best: float) -> str:
        results = []
        for seed in range(5):
            losses = {"baseline, rate 1": 2.0, "baseline, rate 2": 2.5}
            losses |= {"sparse, rate 1": sparse_same, "sparse, rate 2": sparse_best}
            runs = {name: dict.fromkeys(("end", "held_out"), loss + 0.01 * seed) for name, loss in losses.items()}
            results.append({"runs": runs})
        compared = claims.training_claims.compared
        cases = compared(results, "sparse", "baseline", claims.training_claims.METRICS)
        return claims.verdicts.Claim("sparse is better", tuple(cases)).verdict

    assert verdict(1.5, 1.4) == "holds"
    assert verdict(2.2, 2.1) == "does not hold"
    assert verdict(2.2, 1.9) == "holds under conditions"


def test_claims_that_are_known_to_be_wrong_come_out_wrong(claims):
    a, s = claims.arithmetic, claims.systems
    substitute = {
        claim.text: claim for claim in a.substitute_claims([a.substitute({"beta": [0.9, 0.99], "k": [2, 4, 8]}, 0)])
    }
    assert substitute["That error is O(1 / k^2)."].verdict == "does not hold"
    wrong = next(claim for text, claim in substitute.items() if "table" in text)
    assert wrong.verdict == "does not hold"
    assert "0.00369" in wrong.cases[0].measured
    assert substitute["1 - (1 - beta) / k, twice over, is beta up to 0.0025 (beta 0.9)."].verdict == "holds"
    examples = {claim.text: claim.verdict for claim in a.example_claims([a.examples({}, 0)])}
    assert examples["So the doubled batch takes 2.06 times fewer steps."] == "does not hold"
    assert examples["Global batches of the worked examples, N b k."] == "holds"
    reduced, _, _ = s.collectives_claims([s.collectives(s.SETTINGS["collectives"], 0)])
    assert [case.holds for case in reduced.cases] == [True, True, False, False]
    assert "70 s" in reduced.right
    assert "8.75 s" in reduced.right


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


def test_sparse_updates_and_accumulation_are_what_their_equations_say(claims):
    settings = {"curvature": [1.0, 1.0], "start": [1.0, 1.0], "beta": 0.5}
    silent = np.zeros((2, 1, 2))

    def end(method: str) -> float:
        return float(claims.quadratic.trajectory(method, settings, 2, 0.1, silent)[-1, 0, 0])

    assert end("accumulated") == pytest.approx(1 - 0.1 * 0.5)  # m = (1 - beta) mean
    assert end("sparse") == pytest.approx(1 - 0.1 * 0.75)  # m = 1/2, then 3/4
    assert end("standard") == pytest.approx(0.95 - 0.1 * (0.25 + 0.5 * 0.95))


def test_oscillation_is_that_about_the_moving_average(claims):
    ramp, rng = np.linspace(3, 1, 400), np.random.default_rng(0)
    assert claims.training.oscillation(ramp, 32) < 0.01
    assert claims.training.oscillation(ramp + 0.2 * rng.standard_normal(400), 32) == pytest.approx(0.2, rel=0.1)


def test_second_moments_measure_what_theory_says(claims):
    m = claims.moments
    settings = m.SETTINGS | {"rho": [1.0], "k": [4], "d": 400, "steps": 60}
    of = m.second_moment(settings, 0)["stationary"]["4"]
    for variant in m.VARIANTS:
        assert of[variant]["v"][0] == pytest.approx(m.theory(variant, np.array([1.0]), 4)[0], rel=0.1)


TINY = {"characters": 20, "width": 8, "heads": 2, "length": 6, "b": 2, "held_out": 2, "micro_steps": 20, "rate": 0.5}


def last(claims, row, **changes) -> torch.Tensor:
    """Train one row: the digest stands for its last parameters."""
    return claims.language.train([row], TINY | changes, 0)


def test_a_worker_alone_trains_as_torchs_optimizers_do(claims):
    language = claims.language
    for name in ("sgd", "adamw"):
        lot = language.Rows(TINY, 0)
        model = lot.model
        options = (
            {"lr": 0.0, "weight_decay": 0.0, "betas": (0.9, 0.99)} if name == "adamw" else {"lr": 0.0, "momentum": 0.9}
        )
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
        optimizer = kind(model.parameters(), **options, **({"dampening": 0.9} if name == "sgd" else {}))
        for step in range(TINY["micro_steps"]):
            rate = TINY["rate"] * min(1.0, (step + 1) / (TINY["micro_steps"] / 10))
            optimizer.param_groups[0]["lr"] = rate * (0.01 if name == "adamw" else 1.0)
            tokens = lot.draw(TINY["b"], 0, lot.train_until)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
            if name == "sgd" and step == 0:  # torch's first momentum is the whole gradient
                for parameter in model.parameters():
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            optimizer.step()
        with torch.no_grad():
            loss = float(lot.loss(torch.nn.utils.parameters_to_vector(model.parameters()), lot.held_out))
        curves, _ = last(claims, language.Row(1.0, name, beta2=0.99))
        assert curves[0][-1] == pytest.approx(loss, abs=2e-4)
        assert curves[0][0] - curves[0][-1] > 0.01


def test_stale_gradients_are_those_of_the_parameters_that_the_worker_read(claims):
    """Three workers in turn: theta(t + 1) = theta(t) - rate m, m from the gradient at theta(t - 2)."""
    language = claims.language
    short = TINY | {"micro_steps": 20}
    lot = language.Rows(short, 0)
    path, m = [lot.first[None]], torch.zeros_like(lot.first[None])
    for step in range(20):
        used = path[max(0, step - 2)]
        g, _ = lot.gradients(used, lot.draw(TINY["b"], 0, lot.train_until))
        m = 0.9 * m + 0.1 * g
        path.append(path[-1] - TINY["rate"] * min(1.0, (step + 1) / 2) * m)
    told = float(lot.losses(path[-1], lot.held_out)[0])
    curves, _ = last(claims, language.Row(1.0, workers=3))
    alone, _ = last(claims, language.Row(1.0))
    assert curves[0][-1] == pytest.approx(told, abs=2e-4)
    assert abs(alone[0][-1] - told) > 1e-3


def test_corrections_are_what_their_equations_say(claims):
    language = claims.language
    theta, g, moved = torch.tensor([[1.0]]), torch.tensor([[2.0]]), torch.tensor([[0.5]])

    def step(row, staleness: float) -> float:
        update = language.Update([row], theta)
        return float(1.0 - update(theta, g, moved, torch.tensor([staleness]), 1.0, torch.tensor([True])))

    plain = step(language.Row(1.0), 4.0)
    assert plain == pytest.approx(0.1 * 2.0)  # (1 - beta) g
    assert step(language.Row(1.0, correction="rate"), 4.0) == pytest.approx(plain / 4)
    assert step(language.Row(1.0, correction="rate"), 0.0) == pytest.approx(plain)
    # mean square 0.05 g^2; g + 2 / sqrt(0.2) g^2 moved
    told = 0.1 * (2.0 + 2 / 0.2**0.5 * 4.0 * 0.5)
    assert step(language.Row(1.0, correction="compensated"), 4.0) == pytest.approx(told, rel=1e-5)


def test_workers_that_wait_take_the_step_of_the_mean_gradient(claims):
    """Two that wait, with 2 sequences each, are one with the 4: the same samples in the same order."""
    row = claims.language.Row(1.0, workers=2, waiting=True)
    waiting, _ = last(claims, row, held_out=8)
    alone, _ = last(claims, claims.language.Row(1.0), held_out=8)
    assert waiting[0][1::2] != alone[0][1::2]
    lot = claims.language.Rows(TINY | {"held_out": 8}, 0)
    theta, m = lot.first[None], torch.zeros_like(lot.first[None])
    for update in range(10):
        tokens = torch.cat([lot.draw(2, 0, lot.train_until) for _ in range(2)])
        m = 0.9 * m + 0.1 * lot.gradients(theta, tokens)[0]
        theta = theta - TINY["rate"] * min(1.0, (2 * update + 2) / 2) * m
    assert waiting[0][-1] == pytest.approx(float(lot.losses(theta, lot.held_out)[0]), abs=2e-4)


def test_a_training_is_repeated_to_the_bit_and_arrivals_decide_it(claims):
    row = claims.language.Row(1.0, workers=4)
    (_, first), (_, again) = last(claims, row), last(claims, row)
    assert first == again
    assert last(claims, dataclasses.replace(row, order="at random"))[1] != first
    steps = claims.language.arrivals([row, dataclasses.replace(row, order="at random")], 400, 0)
    assert steps[:, 0].tolist() == [0, 1, 2, 3] * 100
    assert 70 < min(np.bincount(steps[:, 1])) <= max(np.bincount(steps[:, 1])) < 130


def test_random_arrivals_are_momentum_and_turns_are_not(claims):
    found = claims.asynchronous.implicit_momentum({"chains": 2000, "path": 60}, 0)
    assert found["5 workers, at random"] < 0.01 < found["5 workers, in turn"]


def test_who_waits_for_nobody_gains_by_scatter_alone(claims):
    found = claims.asynchronous.speeds({"scatter": [0.0, 0.5], "draws": 4000}, 0)
    assert found["scatter 0, 9 workers"]["waiting"] == pytest.approx(found["scatter 0, 9 workers"]["free"])
    assert found["scatter 0.5, 9 workers"]["waiting"] > 1.5 * found["scatter 0.5, 9 workers"]["free"]
    assert found["one half as fast, 2 workers"] == {"waiting": 1.0, "free": pytest.approx(2 / 3)}


def test_a_loss_is_reached_between_the_points_of_a_curve_or_never(claims):
    until = claims.asynchronous_claims.tokens_until
    assert until([3.0, 2.0], 2.5, first=4.0) == 0.75
    assert until([3.0, 2.0], 3.5, first=4.0) == 0.25
    assert until([3.0, 2.0], 1.9, first=4.0) == claims.asynchronous_claims.NEVER


def test_rules_for_coefficients_keep_what_they_promise(claims):
    rules = claims.betas.RULES
    assert rules["b^k"](0.9, 4) == pytest.approx(0.6561)
    assert rules["b^(1/k)"](0.9, 4) ** 4 == pytest.approx(0.9)
    distances = {name: claims.betas.path_distance(rule(0.9, 4), claims.betas.SETTINGS) for name, rule in rules.items()}
    assert min(distances, key=distances.__getitem__) in ("b^k", "1 - k (1 - b)")
    assert distances["b^k"] < 0.05 < distances["1 - (1 - b) / k"]


def test_the_natural_gradient_is_told_from_a_mean(claims):
    settings = claims.second_order.EXPERIMENTS[0].settings | {"runs": 400, "k": [4], "many": 2000}
    of = claims.second_order.natural(settings, 0)
    assert of["power"]["natural 4"] == pytest.approx(-1, abs=0.1)
    assert of["power"]["accumulated 4"] == pytest.approx(0, abs=0.1)
    assert of["fisher"]["1 sample, at the minimum"] < 0.3 < of["fisher"]["8 samples, at the minimum"]


def test_batch_normalisation_in_pieces_is_that_of_micro_batches(claims):
    """Outputs, gradients, and running statistics: the mean of those of the micro-batches."""
    torch.manual_seed(0)
    x = torch.randn(12, 3, 4, 4, dtype=torch.float64)
    pieces = claims.small_batches.Pieces(3, 4).double()
    usual = torch.nn.BatchNorm2d(3).double()
    whole, one_by_one = pieces(x), torch.cat([usual(part) for part in x.split(4)])
    torch.testing.assert_close(whole, one_by_one)
    (weight,) = torch.autograd.grad((whole**3).sum(), [pieces.weight])
    torch.testing.assert_close(weight, torch.autograd.grad((one_by_one**3).sum(), [usual.weight])[0])
    means = torch.stack([part.mean((0, 2, 3)) for part in x.split(4)])
    torch.testing.assert_close(pieces.running_mean, 0.1 * means.mean(0))
    torch.testing.assert_close(
        pieces.eval()(x[:1]),
        (x[:1] - pieces.running_mean.view(1, 3, 1, 1)) / (pieces.running_var.view(1, 3, 1, 1) + pieces.eps).sqrt(),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The program


def test_a_run_writes_every_result_and_a_document_that_names_what_is_missing(claims, tried, tmp_path):
    text = tried()
    files = {path.name for path in (tmp_path / "results").iterdir()}
    assert files == {"indicator-0.json", *(f"{name}-{seed}.json" for name in ("division", "wells") for seed in (0, 1))}
    for name in claims.study.EXPERIMENTS:
        assert f"(`{name}`)\n" in text
    assert "Not run yet" in text
    assert "Preliminary" in text
    assert "**holds under conditions**: k = 2 and more." in text


def test_results_are_reused_unless_settings_or_code_changed(claims, tried, tmp_path, monkeypatch):
    calls = []
    experiment = claims.study.EXPERIMENTS["division"]

    def counted(settings: dict, seed: int) -> dict:
        calls.append(seed)
        return experiment.measure(settings, seed)

    def change(**fields) -> None:
        replaced = dataclasses.replace(experiment, measure=counted, **fields)
        monkeypatch.setitem(claims.study.EXPERIMENTS, "division", replaced)

    change()
    tried(only=["division"])
    tried(only=["division"])
    assert calls == [0, 1]  # the second time nothing
    (tmp_path / "results" / "division-1.json").write_text("{half a fi")
    tried(only=["division"])
    assert calls == [0, 1, 1]
    change(settings=experiment.settings | {"targets": 9})
    tried(only=["division"])
    assert calls == [0, 1, 1, 0, 1]
    change(settings=experiment.settings | {"targets": 9}, sources=(claims.verdicts,))
    tried(only=["division"])
    assert calls == [0, 1, 1, 0, 1, 0, 1]
    tried("--fresh", only=["division"])
    assert len(calls) == 9


def test_documents_are_written_of_results_of_older_code_if_that_is_said(claims, tried, tmp_path):
    tried(only=["division"])
    path = tmp_path / "results" / "division-0.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"fingerprint": "', '"fingerprint": "older '), encoding="utf-8"
    )
    before = path.read_text(encoding="utf-8")
    assert "`division`" not in tried("--write", only=["division"]).split("Not run yet")[1].split("\n")[0]
    assert path.read_text(encoding="utf-8") == before
    path.unlink()
    assert "`division`" in tried("--write", only=["division"]).split("Not run yet")[1].split("\n")[0]


def test_comments_do_not_count_as_code(claims):
    code = claims.study._code
    assert code('def f():\n    """Text."""\n    return 1  # one\n') == code("def f():\n    return 1\n")
    assert code("def f():\n    return 1\n") != code("def f():\n    return 2\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1"], "a spread takes 2"),
        (["--quick"], "does not write studies/claims/claims.md"),
        (["--jobs", "0"], "takes 1 or more"),
        (["--only", "nothing"], "invalid choice"),
    ],
)
def test_bad_usage_is_refused(claims, arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        claims.study.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_list_runs_nothing(claims, capsys):
    claims.study.main(["--list"])
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(claims.study.EXPERIMENTS)


def shown(text: str, report) -> str:
    return text.split(report.BEGIN)[1].split(report.END)[0]


def test_the_committed_document_shows_the_committed_results(claims):
    document, results = HOME / "claims.md", HOME / "results"
    found = {}
    for name, experiment in claims.study.EXPERIMENTS.items():
        files = [claims.study.file_of(experiment, seed, results) for seed in claims.study.seeds_of(experiment, 5)]
        have = all(file.exists() for file in files)
        found[name] = [json.loads(file.read_text(encoding="utf-8")) for file in files] if have else None
    text = document.read_text(encoding="utf-8")
    for name in claims.study.EXPERIMENTS:
        assert f"(`{name}`)\n" in text
    assert text == claims.report.markdown(claims.study.EXPERIMENTS, found)
    assert shown(claims.study.README.read_text(encoding="utf-8"), claims.report) == claims.report.believed(
        claims.study.EXPERIMENTS, found
    )
    for name in claims.study.PAGES:
        page = (claims.study.DOCS / f"{name}.md").read_text(encoding="utf-8")
        shown_part = page.split(f"<!-- {name}: begin -->\n")[1].split(f"<!-- {name}: end -->")[0]
        assert shown_part == claims.report.part(claims.study.EXPERIMENTS[name], found[name])
    for name, files in found.items():
        for picture in claims.study.EXPERIMENTS[name].pictures if files else ():
            assert 0 < (HOME / "pictures" / picture).stat().st_size < 150_000


def test_every_claim_with_an_author_is_a_claim(claims):
    text = (HOME / "claims.md").read_text(encoding="utf-8")
    assert [claim for claim in claims.report.SOURCES if f"\n### {claim}\n" not in text] == []


def test_links_lead_somewhere():
    for document in (HOME / "README.md", HOME / "claims.md"):
        text = document.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)h][^)]*)\)", text):
            file, _, anchor = link.partition("#")
            assert (HOME / file).exists(), link
            titles = re.findall(r"^#+ (.*)$", (HOME / file).read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
