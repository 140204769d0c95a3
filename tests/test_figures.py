"""The picture of the README is what its numbers say, and they say that the curves lie on each other."""

import json
import xml.etree.ElementTree

import pytest
from common import ROOT, load_benchmark

RESULTS = json.loads((ROOT / "benchmarks" / "results" / "figures.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def figures():
    return load_benchmark("figures")


def test_the_pictures_are_current(figures):
    """If not: python benchmarks/figures.py --draw"""
    for theme, path in figures.PICTURES.items():
        text = path.read_text(encoding="utf-8")
        assert text == figures.draw(RESULTS, theme)
        root = xml.etree.ElementTree.fromstring(text)
        assert root.get("viewBox") == f"0 0 {figures.WIDTH} {figures.HEIGHT}"


def test_the_curves_lie_on_each_other_and_the_documented_ones_do_not(figures):
    ours, others = (
        [run for run in RESULTS["runs"] if (run["program"] == "samestep") == is_ours] for is_ours in (True, False)
    )
    assert [run["name"] for run in ours] == list(figures.OURS)
    assert [len(run["kills"]) for run in ours] == [0, 0, 0, 2]
    for run in RESULTS["runs"]:
        assert len(run["losses"]) == figures.NUM_STEPS
        assert run["losses"][0] == pytest.approx(ours[0]["losses"][0], abs=1e-4), "the same samples and weights"
    farthest = max(max(figures.differences(RESULTS, run)) for run in ours)
    assert farthest < 0.01
    for run in others:
        assert max(figures.differences(RESULTS, run)) > 20 * farthest


def test_a_run_that_parts_is_drawn_apart(figures):
    runs = [{"program": "samestep", "name": name, "kills": [], "losses": [2.0, 1.0, 0.9, 0.8]} for name in "ab"]
    picture = figures.draw({"runs": runs}, "light")
    runs[1]["losses"] = [2.0, 1.5, 0.9, 0.8]
    assert figures.draw({"runs": runs}, "light") != picture
