"""The page of a plan and the chart of `scale`: what they show, what they may not hold, what a browser makes of them."""

import base64
import contextlib
import hashlib
import io
import itertools
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import yaml
from common import PLANNED
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError

from samestep import cli as program
from samestep.errors import UsageError, exit_code
from samestep.pages import TEMPLATES, format_date
from samestep.printing import round_number
from samestep.recipe.catalog import CATALOG
from stepplan.answer import describe_fits
from stepplan.cli.plan import plan
from stepplan.cli.scale import scale
from stepplan.growth_plot import plot_growth
from stepplan.hardware import DEVICES, device_names, parse
from stepplan.methods import METHODS, Fit, make_model_workload
from stepplan.page import fits_page, page
from stepplan.placement import place
from stepplan.text import explain_band, make_fits_table

STYLE, SCRIPT = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
VOID = {"meta", "line", "rect", "circle", "polyline"}
HOSTILE = "<script>alert(1)</script><img src=//x.org/y onerror=alert(2)>\"' & </style> &amp; </svg>"


class Page(HTMLParser):
    """Elements in order: tag, attributes, and the text inside. What is not closed in its turn is an error."""

    def __init__(self, source: str):
        super().__init__()
        self.source, self.elements, self.open = source, [], []
        self.feed(source)
        self.close()
        assert not self.open, f"left open: {[element['tag'] for element in self.open]}"

    def handle_starttag(self, tag, attrs):
        self.elements.append({"tag": tag, "text": "", **dict(attrs)})
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        if tag not in VOID:  # <rect/> starts and ends
            assert self.open, f"</{tag}> closes nothing"
            assert self.open[-1]["tag"] == tag, f"</{tag}> closes <{self.open[-1]['tag']}>"
            self.open.pop()

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag: str, **attributes) -> list[dict]:
        attributes = {name.rstrip("_"): value for name, value in attributes.items()}  # class_
        return [element for element in self.elements if element["tag"] == tag and attributes.items() <= element.items()]

    def single(self, tag: str, **attributes) -> dict:
        (element,) = self.all(tag, **attributes)
        return element

    def parts(self, pattern: str) -> list["Page"]:
        return [Page(match[0]) for match in re.finditer(pattern, self.source, re.DOTALL)]

    def section(self, name: str) -> "Page":
        (section,) = self.parts(rf'<section[^>]*id="{name}">.*?</section>')
        return section


def query(command, *argv: str) -> dict:
    """Read what `python -m recipes` prints with --json."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        command([*argv, "--json"])
    return json.loads(output.getvalue())


def make_answer(name: str, hardware: str, *flags: str, up_to: int = 4096) -> dict:
    """Make an answer with all that a page can show."""
    answer = query(plan, name, "--on", hardware, *flags)
    return answer | {"scale": query(scale, name, "--on", parse(hardware).device.name, "--up_to", str(up_to))}


@pytest.fixture(scope="module")
def xl() -> dict:
    return make_answer("gpt2_xl_8xa100", "8xa100-80")


@pytest.fixture(scope="module")
def compared(xl) -> dict:
    """Of several hardware, with money, a start and interruptions: all that a page can show."""
    names = "8xa100-80,1x3090,2x8xa100-80-pcie,8xmi300x,8x5090"
    flags = "--price_per_hour 1.5,0.25,1.2,2,0.6 --start 2026-11-28T09:30 --interruptions_per_day 3"
    rows = query(plan, "gpt2_xl_8xa100", "--on", names, *flags.split())["rows"]
    return xl | rows[0] | {"rows": rows}


@pytest.fixture(scope="module")
def fitting() -> tuple[dict, list, str]:
    """What the page of `plan --what_fits` is made of: of two methods of each of two models, and one that is too large."""
    hardware = parse("4xl4")
    fits = []
    for name, method in itertools.product(("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-3B"), (METHODS[0], METHODS[3])):
        placement = place(make_model_workload(name, 1024, 64, method.changes), hardware)
        fits.append(Fit(name, method, placement, placement))
    answer = describe_fits(hardware, fits, ["meta-llama/Llama-3.1-405B"], 0.7) | {"command": "python -m recipes plan"}
    return answer, make_fits_table(answer), explain_band([answer])


def per_cent(text: str) -> float:
    assert text.endswith("%")
    return float(text[:-1])


def check_it_stands_alone(source: str) -> Page:
    tree = Page(source)
    for element in tree.elements:
        assert element["tag"] not in {"link", "img", "iframe", "object", "embed", "base", "a", "use", "image", "form"}
        assert not {"src", "href", "srcset", "style", "xlink:href"} & element.keys()
        assert not [name for name in element if name.startswith("on")]
    texts = [tree.single("style")["text"], *(script["text"] for script in tree.all("script"))]
    assert texts == ([STYLE, SCRIPT] if tree.all("button") else [STYLE])
    policy = tree.single("meta", **{"http-equiv": "Content-Security-Policy"})["content"]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    assert "'unsafe" not in policy
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert all(f"-src 'sha256-{value}';" in policy for value in hashes), "a browser takes its style and runs its script"
    for text in texts:
        assert not re.search(r"url\(|@import|//|http|fetch|src", text)
    ids = [element["id"] for element in tree.elements if "id" in element]
    assert len(ids) == len(set(ids))
    return tree


# ------------------------------------------------------------------------------------------------------------- structure


@pytest.mark.parametrize(
    ("name", "hardware"),
    [("gpt2_xl_8xa100", "8xa100-80"), ("gpt2_xl_8xa100", "8x3090"), ("bert_large_2080ti", "1x2080ti")],
)
def test_it_is_one_sound_page_that_needs_nothing_from_outside(name, hardware):
    answer = make_answer(name, hardware)
    tree = check_it_stands_alone(page(answer))
    assert tree.source.startswith("<!doctype html>\n")
    assert tree.all("title")[0]["text"] == f"{name} on {hardware}"
    assert "default-src 'none'" in tree.single("meta", **{"http-equiv": "Content-Security-Policy"})["content"]
    assert "width=device-width" in tree.single("meta", name="viewport")["content"]
    for section in ("memory", "time", "scaling", "learning-rate"):
        part = tree.section(section)
        (chart,) = part.parts(r'<svg class="chart.*?</svg>(?=\n)')
        assert chart.elements[0]["role"] == "img"
        assert chart.elements[1]["tag"] == "title"
        assert chart.all("text", class_="x-label")[0]["text"]
        assert len(chart.all("text", class_="tick")) >= 2
        assert len(part.all("tr")) >= 3
        assert [row["scope"] for row in part.all("th")].count("row") == len(part.all("tr")) - 1
        assert section == "time" or (part.all("ul", class_="legend") and part.all("details"))


def test_the_headline_says_what_fits_how_it_is_cut_and_how_long_it_takes(xl):
    sentence = " ".join(Page(page(xl)).single("p", class_="verdict")["text"].split())
    needed, room = xl["memory_needed"] / 1e9, xl["memory_of_device"] / 1e9
    assert sentence == (
        f"✓ It fits {needed:.1f} of {room:.1f} GB with all margins. 8 devices share the 512 samples of a step: 64 each, in 4 "
        "micro-batches of at most 16. All 64,000 steps take 3 days 4 hours (2 days 13 hours to 3 days 23 hours, which held "
        "9 of 10 published speeds)."
    )
    uneven = xl | {"shares": [65, 64], "num_processes": 2, "gradient_accumulation_steps": 1, "global_batch_size": 129}
    assert "2 devices share the 129 samples of a step: 64 to 65 each, in one forward." in page(uneven)
    alone = xl | {"shares": [512], "num_processes": 1}
    assert "One device computes the 512 samples of a step in 4 micro-batches of at most 16." in page(alone)
    too_much = page(xl | {"memory_needed": xl["memory_of_device"] + 1})
    assert "✕ It does not fit" in too_much
    assert "It fits" not in too_much


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("samples_per_second", 7654.3, "<dd>7,654</dd>"),
        ("tokens_per_second", 8642.1, "<dd>8,642</dd>"),
        ("share_of_peak", 0.1234, "<dd>12.3 %</dd>"),
        ("energy_kwh", 4321.0, "<dd>4,321 kWh</dd>"),
        ("seconds_to_end", 100_000.0, "<dd>1 day 4 hours</dd>"),
        ("memory_needed", 12.34e9, "<dd>12.3 of 85.9 GB</dd>"),
        ("memory_of_device", 97.53e9, "the device has 97.5 GB"),
        ("num_parameters", 7_654_321, "<dd>7,654,321</dd>"),
        ("states", 45_678_000_000, "45.7 GB in float32"),
        ("flops_per_sample", 4_567_800_000_000, "4,567.8 GFLOP"),
        ("learning_rate", 0.0123, "<dd>0.0123</dd>"),
        ("adam_beta1", 0.8765, "<dd>0.8765</dd>"),
        ("adam_beta2", 0.98765, "<dd>0.98765</dd>"),
        ("adam_epsilon", 3e-7, "<dd>3e-07</dd>"),
        ("warmup_epochs", 7.5, "<dd>7.5</dd>"),
        ("num_steps", 54_321, "All 54,321 steps take"),
        ("num_warmup_steps", 4321, "after 4,321 steps of warm-up"),
        ("steps_per_epoch", 98_765, "<dd>98,765</dd>"),
        ("global_batch_size", 7531, "the 7,531 samples of a step"),
        ("mixed_precision", "fp16", "<dd>fp16</dd>"),
        ("reason", "because it is so", "data parallel and accumulate; because it is so."),
        ("device", "a device in words", "predicted · a device in words</p>"),
        ("expect", "a loss of 2.345", "a loss of 2.345</p>"),
        ("source", "a paper of 2019", "a paper of 2019</p>"),
        ("warnings", ["first", "second"], "<li>first</li><li>second</li>"),
    ],
)
def test_what_the_answer_says_is_shown(xl, key, value, text):
    assert text not in page(xl)
    assert text in page(xl | {key: value})


def hostile(value):
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_files_of_others_stay_text(tmp_path):
    """A recipe and a device of one's own, through the command that reads them."""
    for name, shipped in (("recipe", CATALOG / "bert_base.yaml"), ("device", DEVICES / "t4.yaml")):
        content = yaml.safe_load(shipped.read_text()) | {"description": f"{name} {HOSTILE}"}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    recipe, device = tmp_path / "recipe.yaml", tmp_path / "device.yaml"
    plan([str(recipe), "--on", f"2x{device}", "--html", str(tmp_path / "plan.html")])
    source = (tmp_path / "plan.html").read_text(encoding="utf-8")
    tree = check_it_stands_alone(source)
    assert [script["text"] for script in tree.all("script")] == [SCRIPT]
    assert tree.single("p", class_="description")["text"] == f"recipe {HOSTILE}"
    assert tree.single("p", class_="above")["text"] == f"Training plan, predicted · device {HOSTILE}"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in source


@pytest.mark.parametrize("key", ["title", "memory", "samples_per_second", "strategy"])
def test_what_is_missing_is_no_empty_place(xl, key):
    with pytest.raises((UndefinedError, KeyError), match=key):
        page({name: value for name, value in xl.items() if name != key})


def test_text_is_never_markup(xl):
    tree = check_it_stands_alone(page(hostile(xl | {"warnings": ["one"]})))
    assert len(tree.all("script")) == 1
    assert tree.all("title")[0]["text"] == f"{HOSTILE} on {HOSTILE}"
    assert tree.single("p", class_="description")["text"] == HOSTILE
    assert tree.single("code", id="command")["text"] == HOSTILE
    assert {item["text"] for item in tree.section("warnings").all("li")} == {HOSTILE}
    assert tree.section("scaling").all("li")[-1]["text"] == HOSTILE
    assert tree.section("settings").source.count("&lt;script&gt;") == 5  # strategy, reason, precision, source, expect
    changed = xl | {"time": xl["time"] | {"<img src=x>": 1}}
    assert "&lt;img src=x&gt;" in check_it_stands_alone(page(changed)).section("time").source


@pytest.mark.parametrize("is_none", [False, True])
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("expect", "What to expect"),
        ("device", " · NVIDIA"),
        ("adam_beta1", "adam_beta1"),
        ("warmup_epochs", "warmup_epochs"),
        ("tokens_per_second", "tokens per second"),
        ("seconds_to_end", "to the end"),
        ("energy_kwh", "energy"),
        ("cost", "in dollars"),
        ("seconds_to_end_range", "9 of 10 published speeds"),
        ("num_steps", "All 64,000 steps"),
        ("steps_per_epoch", "steps_per_epoch"),
        ("num_warmup_steps", "of warm-up"),
        ("warnings", "Before you start"),
        ("micro_batches", "▸"),
        ("learning_rates", 'id="learning-rate"'),
        ("scale", 'id="scaling"'),
    ],
)
def test_a_part_is_left_out_where_its_key_is_missing(xl, key, text, is_none):
    whole = xl | {"warmup_epochs": 2.5, "warnings": ["beware"], "notes": [], "steps_per_epoch": 987}
    whole |= {"cost": 12.0, "cost_range": [8.0, 16.0]}
    assert text in page(whole)
    partial = {name: value for name, value in whole.items() if name != key} | ({key: None} if is_none else {})
    assert text not in check_it_stands_alone(page(partial)).source


def test_a_plan_as_it_is_printed_is_enough(xl):
    printed = query(plan, "bert_base", "--on", "4xt4", "--num_train_epochs", "3")
    tree = check_it_stands_alone(page(printed | {"micro_batches": None}))
    assert len(tree.section("memory").all("g")) == 1


def test_hardware_is_compared(compared, xl):
    """The rows are those of the answer, the one of the page first; what does not fit says why; bars are dollars."""
    tree, rows = check_it_stands_alone(page(compared)), compared["rows"]
    section = tree.section("compare")
    placed = [row for row in rows if "problem" not in row]
    assert [cell["text"] for cell in section.all("th", scope="row")] == [row["hardware"] for row in placed]
    assert (len(placed), tree.all("title")[0]["text"]) == (4, f"gpt2_xl_8xa100 on {placed[0]['hardware']}")
    assert "for a single sample" in section.single("ul", class_="remarks")["text"]
    assert section.single("g", class_="bar chosen")["text"].strip().startswith(f"▸ {placed[0]['hardware']}")
    costs = [row["cost_per_million_samples"] for row in placed]
    assert costs == sorted(costs)
    widths = [per_cent(rect["width"]) for rect in section.all("rect")]
    assert widths == pytest.approx([cost * widths[0] / costs[0] for cost in costs], abs=1e-3)
    dollars = [
        text
        for text in (cell["text"] for cell in section.all("td"))
        if text in {f"{row['cost']:,.0f}" for row in placed}
    ]
    assert len(dollars) == len(placed)
    by_time = [{**row, "cost_per_million_samples": None} for row in placed]
    source = page(compared | {"rows": by_time})
    assert "hours for a million samples" in source
    assert 'id="compare"' not in page(xl)
    assert 'id="compare"' not in page(xl | {"rows": [xl]})


def test_money_dates_and_interruptions_are_shown(compared):
    answer = compared | {"data_bytes": 12.3e9, "download_bytes": 498e6, "cost_per_epoch": 45.6}
    tree = check_it_stands_alone(page(answer))
    pairs = dict(zip(*([e["text"] for e in tree.section("costs").all(tag)] for tag in ("dt", "dd")), strict=True))
    assert pairs["dollars for an epoch"] == "45.6"
    assert pairs["data and cache on disk"] == "12.3 GB"
    assert pairs["weights to download"] == "498 MB"
    assert pairs["a checkpoint"] == f"{answer['checkpoint_bytes'] / 1e9:.1f} GB"
    assert pairs["writing a checkpoint"] == f"{answer['checkpoint_seconds']:.1f} s"
    assert "to the end, with 3 interruptions a day" in pairs
    assert "with 1 interruption a day" in page(answer | {"interruptions_per_day": 1.0})
    sentence = " ".join(tree.single("p", class_="verdict")["text"].split())
    assert f"Started on Saturday 28 November 2026, 09:30, it ends on {format_date(answer['end'])}." in sentence


def test_a_launch_file_that_has_to_be_written_is_named(xl):
    assert "--write_config" not in page(xl)
    answer = query(plan, "bert_base", "--on", "5x3090", "--train_file", "a b/*.txt", "--max_seq_length", "64")
    assert answer["write_command"].endswith("--max_seq_length 64 --write_config 5x3090.yaml")
    tree = check_it_stands_alone(page(answer))
    first, second = (element["text"] for element in tree.section("launch").all("code"))
    assert {first, second} == {answer["command"], answer["write_command"]}
    assert "--train_file 'a b/*.txt' --max_seq_length 64" in answer["command"]


def test_without_a_script_there_is_nothing_to_copy():
    changes = {"command": None, "hint": HOSTILE}
    tree = check_it_stands_alone(page(make_answer("resnet50_imagenet_4xt4", "4xt4", up_to=8) | changes))
    assert tree.section("launch").single("p")["text"] == HOSTILE
    assert not tree.all("button")


@given(
    name=st.sampled_from(PLANNED),
    device=st.sampled_from(device_names()),
    num=st.integers(1, 70),
    up_to=st.sampled_from([1, 2, 4, 64, 4096]),
)
@settings(max_examples=15, deadline=None)
def test_every_plan_has_a_page(name, device, num, up_to):
    try:
        answer = make_answer(name, f"{num}x{device}", up_to=up_to)
    except UsageError:
        return
    check_it_stands_alone(page(answer))


# ---------------------------------------------------------------------------------------------------------------- charts


def find_bars(section: Page) -> list[Page]:
    return section.parts(r'<g class="bar.*?</g>')


def read_colours(bar: Page) -> dict[str, str]:
    """Map the class of each colour to the name of what has it."""
    names = [title["text"].partition(":")[0] for title in bar.all("title")]
    return dict(zip([rect["class"] for rect in bar.all("rect")], names, strict=True))


def test_bars_are_as_long_as_bytes_are_many(xl):
    section = Page(page(xl)).section("memory")
    bars, cuts = find_bars(section), xl["micro_batches"]
    assert [bar.single("text", class_="name")["text"].lstrip("▸ ") for bar in bars] == [
        f"b {cut['per_device_train_batch_size']:,}, k {cut['gradient_accumulation_steps']:,}" for cut in cuts
    ]
    scale = per_cent(section.all("line", class_="limit")[0]["x1"]) / xl["memory_of_device"]
    for bar, cut in zip(bars, cuts, strict=True):
        items = [size for item, size in cut["memory"].items() if item != "total" and item != "gathered"]
        sizes = [*items, cut["needed"] - cut["memory"]["total"]]
        widths = [per_cent(rect["width"]) for rect in bar.all("rect")]
        assert widths == pytest.approx([scale * size for size in sizes], abs=2e-4)
        starts = [per_cent(rect["x"]) for rect in bar.all("rect")]
        assert starts == pytest.approx([0, *itertools.accumulate(widths)][:-1], abs=1e-3)
        assert bar.all("rect")[-1]["class"] == "band"
        assert bar.single("text", class_="note")["text"].startswith("✓" if cut["fits"] else "✕")
        assert bool(bar.all("text", class_="more")) == (sum(widths) > 100)
    keys = [Page(entry) for entry in re.findall(r"<li>.*?</li>", section.source) if "<rect" in entry]
    legend = {key.single("rect")["class"]: key.single("li")["text"].strip().partition(":")[0] for key in keys}
    assert legend == read_colours(bars[0])
    assert list(legend.items())[:4] == [
        ("c1", "parameters"),
        ("c2", "gradients"),
        ("c3", "moments"),
        ("c4", "16-bit copies of weights"),
    ]
    ticks = {float(tick["text"].replace(",", "")): per_cent(tick["x"]) for tick in section.all("text", class_="tick")}
    assert list(ticks.values()) == pytest.approx([scale * 1e9 * gigabytes for gigabytes in ticks], abs=1e-3)
    assert [cut["fits"] for cut in cuts] == [True] * 5 + [False] * 2


def test_the_chosen_micro_batch_is_marked(xl):
    section = Page(page(xl)).section("memory")
    (marked_bar,) = (bar for bar in find_bars(section) if bar.elements[0]["class"] == "bar chosen")
    assert marked_bar.single("text", class_="name")["text"] == "▸ b 16, k 4"
    assert [row["text"] for row in section.all("th", scope="row")] == ["1", "2", "4", "8", "16 (chosen)", "32", "64"]
    (row,) = (row["text"] for row in section.parts(r"<tr>.*?</tr>")[5].all("tr"))
    assert row.endswith(f"{xl['memory_needed'] / 1e9:.1f}yes{xl['time']['total']:.2f} s")


def test_the_time_of_a_step_is_divided_as_predicted(xl):
    time, section = xl["time"], Page(page(xl)).section("time")
    step, peak = find_bars(section)
    parts = [seconds for name, seconds in time.items() if name not in ("communication", "at_peak", "total") and seconds]
    widths = [per_cent(rect["width"]) for rect in step.all("rect")]
    scale = per_cent(peak.single("rect")["width"]) / time["at_peak"]
    assert widths == pytest.approx([scale * part for part in parts], abs=2e-4)
    rows = [row.elements for row in section.parts(r"<tr><th scope=.row.*?</tr>")]
    shares = [float(row[-1]["text"].removesuffix(" %")) for row in rows]
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.4)
    assert shares[0] == pytest.approx(100 * time["products"] / time["total"], abs=0.06)
    assert rows[-1][0]["text"] == "in all4.20 s100.0 %"
    colours = {row[3]["class"]: row[1]["text"].strip() for row in rows[:-1]}
    assert list(colours) == [f"c{number}" for number in range(1, 10)]
    assert read_colours(step).items() <= colours.items()


def test_curves_go_through_their_numbers(xl):
    section, rows = Page(page(xl)).section("scaling"), xl["scale"]["rows"]
    xs = {row["num_devices"]: 100 * math.log(row["num_devices"]) / math.log(4096) for row in rows}
    heights = {}
    for kind, curve in zip(("strong", "weak"), section.all("polyline")[1:], strict=True):
        assert curve["class"] == kind
        placed = [row for row in rows if row[kind]]
        points = [tuple(map(float, point.split(","))) for point in curve["points"].split()]
        circles = [
            (per_cent(dot["cx"]), per_cent(dot["cy"])) for dot in section.all("circle", class_=kind) if "%" in dot["cx"]
        ]
        assert circles == points
        assert [x for x, _ in points] == pytest.approx([xs[row["num_devices"]] for row in placed], abs=1e-3)
        heights |= {row[kind]["samples_per_second"]: 100 - y for row, (_, y) in zip(placed, points, strict=True)}
    (low, bottom), (high, top) = min(heights.items()), max(heights.items())
    for speed, height in heights.items():
        assert height == pytest.approx(bottom + (top - bottom) * math.log(speed / low) / math.log(high / low), abs=1e-2)
    ticks = {int(tick["text"].replace(",", "")): per_cent(tick["x"]) for tick in section.all("text", class_="tick")}
    assert ticks == pytest.approx({count: xs[count] for count in ticks}, abs=1e-3)
    ideal = [tuple(map(float, point.split(","))) for point in section.all("polyline")[0]["points"].split()]
    assert ideal[0] == (0, 100 - heights[rows[0]["strong"]["samples_per_second"]])
    assert ideal[1][1] < 100 - top  # nothing is above it
    marker = section.all("line", class_="here")[0]
    assert (per_cent(marker["x1"]), per_cent(marker["x2"])) == pytest.approx((xs[8], xs[8]), abs=1e-3)
    micro_batches = [cell["text"] for cell in section.parts(r"<tr>.*?</tr>")[4].all("td")]
    assert micro_batches[0] == f"{rows[3]['strong']['samples_per_second']:.0f}"
    assert micro_batches[2] == f"{100 * rows[3]['strong']['efficiency']:.1f} %"
    assert len(section.all("td")) == 8 * len(rows)


def test_the_learning_rate_is_drawn_over_the_steps(xl):
    section, points = Page(page(xl)).section("learning-rate"), xl["learning_rates"]
    curve = [tuple(map(float, point.split(","))) for point in section.single("polyline")["points"].split()]
    highest = max(rate for _, rate in points)
    top = max(100 - y for _, y in curve)
    assert [x for x, _ in curve] == pytest.approx([100 * step / 64_000 for step, _ in points], abs=1e-3)
    assert [100 - y for _, y in curve] == pytest.approx([top * rate / highest for _, rate in points], abs=1e-2)
    ticks = [(float(tick["text"]), 100 - per_cent(tick["y"])) for tick in section.all("text", class_="y-tick")]
    assert [height for _, height in ticks] == pytest.approx(
        [top * tick * 1e-4 / highest for tick, _ in ticks], abs=1e-2
    )
    assert "learning rate, × 10⁻⁴" in section.source
    assert len(section.all("td")) == len(points)
    for flat in ([[0, 0.0], [10, 0.0]], [[0, 0.5]]):
        check_it_stands_alone(page(xl | {"learning_rates": flat}))


def luminance(colour: str) -> float:
    """Compute the luminance of WCAG 2, relative to white."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_both_schemes_have_every_colour_and_can_be_read():
    """Contrast of text is at least 4.5, as WCAG 2 asks for."""
    schemes = [
        dict(re.findall(r"(--\w+): (#\w+)", text)) for text in STYLE.split("@media (prefers-color-scheme: dark)")
    ]
    assert schemes[0].keys() == schemes[1].keys() == set(re.findall(r"var\((--\w+)\)", STYLE))
    for colours in schemes:
        shines = {name: luminance(colour) for name, colour in colours.items()}
        for pair in ("text page", "soft page", "accent page", "page c4", "text box"):
            darker, lighter = sorted(shines[f"--{name}"] for name in pair.split())
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, pair
        assert (shines["--c7"] + 0.05) / (luminance("#1c2127") + 0.05) >= 4.5


def test_growth_is_drawn_into_a_png(xl, real_figures):
    late = query(scale, "gpt2_xl_8xa100", "--on", "3090")  # it fits from 2 on
    pictures = [plot_growth(answer) for answer in (xl["scale"], late)]
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 20_000 for picture in pictures)
    assert pictures[0] != pictures[1]


def test_what_fits_is_a_page(fitting):
    answer, table, band = fitting
    tree = check_it_stands_alone(fits_page(answer, table, band))
    assert tree.all("title")[0]["text"] == "What fits on 4xl4"
    assert [cell["text"] for cell in tree.all("th", scope="row")] == [row["model"] for row in answer["rows"]]
    speeds = [cell["text"] for cell in tree.all("td") if cell["data-name"] == "tokens/s"]
    assert speeds == [round_number(row["typical"]["tokens_per_second"]) for row in answer["rows"]]
    assert "meta-llama/Llama-3.1-405B" in tree.section("too-large").source
    assert " ".join(tree.single("p", class_="verdict")["text"].split()) == "✓ 2 models of 3 can be fine-tuned here."
    assert tree.single("code", id="command")["text"] == answer["command"]
    rows = [row | {"model": HOSTILE} for row in answer["rows"]]
    hostile = answer | {"hardware": HOSTILE, "rows": rows, "too_large": [HOSTILE], "command": HOSTILE}
    assert [element["tag"] for element in check_it_stands_alone(fits_page(hostile, table, HOSTILE)).elements].count(
        "img"
    ) == 0
    nothing = answer | {"rows": [], "command": None}
    tree = check_it_stands_alone(fits_page(nothing, make_fits_table(nothing), band))
    assert "Nothing" in tree.single("p", class_="verdict")["text"]
    assert not tree.all("table")


# --------------------------------------------------------------------------------------------------------- in a browser


# Pressed in turn: a clipboard; one that refuses, and the older way; neither. Then what sticks out, and what overlaps.
PROBE = """<script>
document.querySelectorAll("details").forEach((details) => details.open = true);
const button_ = document.getElementById("copy"), said = document.getElementById("copied"), found = {copied: []};
const clipboards = [{writeText: async (text) => found.copied.push(text)}, {writeText: async () => { throw 0; }}, undefined];
const box = (element) => element.getBoundingClientRect();
(async () => {
  for (const [number, clipboard] of clipboards.entries()) {
    Object.defineProperty(navigator, "clipboard", {value: clipboard, configurable: true});
    document.execCommand = (name) => { found.copied.push(name, getSelection().toString()); return number < 2; };
    button_.click();
    await new Promise((done) => setTimeout(done, 20));
    found.copied.push(said.textContent);
  }
  found.width = innerWidth;
  const visible = document.documentElement.clientWidth;
  found.scrolls = document.documentElement.scrollWidth - visible;
  const sticksOut = (of) => box(of).width && (box(of).left < -0.5 || box(of).right > visible + 0.5);
  const isCut = (of) => of.tagName === "g" || of.closest(".scroll, .chart svg");
  found.outside = [...document.querySelectorAll("main *")].filter((of) => !isCut(of) && sticksOut(of));
  found.outside = found.outside.map((of) => of.outerHTML.slice(0, 200));
  found.overlapping = [...document.querySelectorAll(".chart")].flatMap((chart) => {
    const ticks = [...chart.querySelectorAll(".tick")];
    return ticks.slice(1).filter((tick, i) => box(tick).left < box(ticks[i]).right + 2).map((tick) => tick.textContent);
  });
  found.covered = [...document.querySelectorAll(".bars")].flatMap((chart) => [...chart.querySelectorAll(".name, .note")]
    .filter((text) => box(text).right > box(chart.querySelector(".grid")).left).map((text) => text.textContent));
  found.small = [...document.querySelectorAll("main *")].map((of) => parseFloat(getComputedStyle(of).fontSize));
  found.small = Math.min(...found.small);
  parent.postMessage(found, "*");
})();
</script></body>"""
FRAMES = """<!doctype html><body><script>
addEventListener("message", (event) => {
  const line = document.createElement("pre");
  line.textContent = JSON.stringify(event.data);
  document.body.append(line);
});
</script>"""


def hash_probe() -> str:
    """Write the source of the probe for a page's policy, which allows its own script alone."""
    text = PROBE.partition("<script>")[2].partition("</script>")[0]
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@pytest.fixture
def browse(tmp_path):
    """Opens a file in a headless browser; returns the document as it is in the end, and what the console says."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(names)}")

    def opened(file):
        flags = (
            "--headless --no-sandbox --disable-gpu --virtual-time-budget=5000 --enable-logging=stderr --v=0 --dump-dom"
        )
        command = [browser, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"file://{file}"]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return opened


def test_in_a_browser(xl, compared, fitting, browse, tmp_path):
    """Nothing scrolls sideways, sticks out or overlaps on a phone and on a desktop; the button copies; no errors."""
    long = {
        "recipe": "a_recipe_of_a_rather_long_name_" + 3 * "and_more_",
        "description": 40 * "long",
        "warnings": [99 * "w"],
    }
    long |= {"command": xl["command"] + " --output_dir " + 30 * "folder/"}
    answers = [xl, xl | long, compared | {"recipe": "compared"}, make_answer("bert_large_2080ti", "1x2080ti")]
    sources = {answer["command"]: page(answer) for answer in answers} | {fitting[0]["command"]: fits_page(*fitting)}
    cases = list(itertools.product([*map(page, answers), fits_page(*fitting)], (360, 768, 1280)))
    frames = FRAMES
    for number, (source, width) in enumerate(cases):
        assert source.count("; script-src ") == 1
        probed = source.replace("</body>", PROBE).replace("; script-src ", f"; script-src '{hash_probe()}' ")
        (tmp_path / f"{number}.html").write_text(probed, encoding="utf-8")
        frames += f'<iframe src="{number}.html" width="{width}" height="800" style="border: 0"></iframe>'
    (tmp_path / "frames.html").write_text(frames, encoding="utf-8")
    document, console = browse(tmp_path / "frames.html")
    assert console == []
    reports = [json.loads(line["text"]) for line in Page(document.replace("<!DOCTYPE html>", "")).all("pre")]
    assert len(reports) == len(cases)
    for report in reports:
        assert report["scrolls"] == 0
        assert report["outside"] == []
        assert report["overlapping"] == []
        assert report["small"] >= 11
    assert {report["copied"][0] for report in reports} == sources.keys()
    assert all(report["covered"] == [] for report in reports)
    for report in reports:
        command = report["copied"][0]
        last = ["copy", command, "Selected: press Ctrl+C or ⌘C to copy."]
        assert report["copied"] == [command, "Copied.", "copy", command, "Copied.", *last]
    assert sorted(report["width"] for report in reports) == sorted(width for _, width in cases)


def test_the_browser_would_tell_of_an_error(browse, tmp_path):
    (tmp_path / "broken.html").write_text("<script>button.hidden = false;</script>")
    (error,) = browse(tmp_path / "broken.html")[1]
    assert "button is not defined" in error


def test_the_command_writes_it(xl, capsys, tmp_path):
    line = f"plan gpt2_xl_8xa100 --on 8xa100-80 --html {tmp_path / 'plan.html'}"
    assert exit_code(lambda: program.main(line.split())) in (0, None)
    assert "8 processes x 64 samples" in capsys.readouterr().out
    assert (tmp_path / "plan.html").read_text() == page(xl)
    assert exit_code(lambda: program.main(line.split())) in (0, None)  # the same page again
    (tmp_path / "plan.html").write_text("another")
    assert exit_code(lambda: program.main(line.split())) == 2
    assert "it exists already" in capsys.readouterr().err


def test_scale_writes_its_picture(capsys, tmp_path):
    line = f"scale bert_base --on t4 --up_to 8 --plot {tmp_path / 'a.png'}"
    assert exit_code(lambda: program.main(line.split())) in (0, None)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "a.png").write_text("another")
    assert exit_code(lambda: program.main(line.split())) == 2
    assert "it exists already" in capsys.readouterr().err
