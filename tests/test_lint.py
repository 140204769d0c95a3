"""The lint: each rule speaks of a loop that has its fault, at its line, and is silent about the same loop made right."""

import json
import re
import subprocess
import sys

import pytest
from common import ROOT

from stepaudit.lint import reading
from stepaudit.lint.command import lint
from stepaudit.lint.formats import anchor, format_sarif
from stepaudit.lint.reading import lint_text
from stepaudit.lint.rules import RULES

GUARDED = """
import torch.nn.functional as F; scheduler = StepLR(optimizer, {length})
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        {head}
        loss = F.cross_entropy(model(x), y{loss}) {divided}
        loss.backward()
        {behind}
        if {test}:
            {step}optimizer.step()
            optimizer.zero_grad()
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps={k})
optimizer = AdamW(model.parameters())
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps={warmup}, num_training_steps={length})
model, optimizer, loader{more} = accelerator.prepare(model, optimizer, loader{more})
for batch in loader:
    with accelerator.accumulate(model):
        {head}
        loss = model(**batch).loss{divided}
        accelerator.backward(loss)
        {behind}
        optimizer.step()
        {tick}
        {empty}
{end}
"""
OWN_LOSS = """
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
class MyTrainer({base}):
    def compute_loss(self, model, inputs, return_outputs=False, {taken}):
        return {loss}
trainer = {made}(model, TrainingArguments("out", gradient_accumulation_steps={k}))
"""
EXACT = """
from samestep import exact_windows
for step in exact_windows(accelerator, loader, gradient_accumulation_steps=accum, targets=count):
    for x, y in step:
        with accelerator.accumulate(model):
            accelerator.backward(step.loss(cross_entropy(model(x), y, reduction="sum"){divided}))
"""
REPORT = """
import torch.nn.functional as F
total = 0
for x, y in loader:
    loss = F.{loss}
    total += {added}
print(total / {divisor})
"""
SAMPLER = """
from torch.utils.data.distributed import DistributedSampler
sampler = DistributedSampler(data{shuffle})
loader = DataLoader(data, sampler=sampler)
for epoch in range(9):
    {told}
    for x, y in loader:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
"""
TWICE = """
from accelerate import Accelerator
accelerator = Accelerator()
sampler = {sampler}(data)
loader = DataLoader(data, sampler=sampler)
model, loader = accelerator.prepare(model, loader)
"""
TRAINER = """
from transformers import AutoModelForSequenceClassification, AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelFor{head}.from_pretrained("a"{load})
trainer = Trainer(model=model, args=TrainingArguments("out"{k}){more})
"""
INNER = """
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(model)
while True:
    for micro_step in range(gradient_accumulation_steps):
        {head}
        loss = F.mse_loss(model(x), y) / gradient_accumulation_steps
        loss.backward()
        {behind}
    optimizer.step()
    optimizer.zero_grad()
"""
RIGHT = {
    GUARDED: {
        "head": "pass", "loss": "", "divided": "/ k", "behind": "pass", "step": "", "length": "30",
        "test": "(i + 1) % k == 0 or i + 1 == len(loader)",
    },
    ACCELERATE: {
        "k": "args.accum", "warmup": "0", "length": "args.steps * accelerator.num_processes", "more": ", scheduler",
        "head": "pass", "divided": "", "behind": "pass", "tick": "scheduler.step()", "empty": "optimizer.zero_grad()",
        "end": "",
    },
    EXACT: {"divided": ""},
    REPORT: {"loss": "cross_entropy(model(x), y)", "added": "loss.item() * len(x)", "divisor": "len(data)"},
    SAMPLER: {"shuffle": "", "told": "sampler.set_epoch(epoch)"},
    TWICE: {"sampler": "RandomSampler"},
    OWN_LOSS: {"base": "Trainer", "taken": "num_items_in_batch=None", "made": "MyTrainer", "k": "args.accum",
        "loss": "cross_entropy(model(inputs), reduction='sum') / num_items_in_batch"},
    TRAINER: {"head": "SequenceClassification", "k": "", "more": "", "load": ""},
    INNER: {"head": "model.require_backward_grad_sync = micro_step == 7", "behind": "pass"},
}  # fmt: skip
COLLATOR = "collator = DataCollatorForSeq2Seq(tokenizer)"
CASES = [  # rule, line, program, what is other than right
    ("SA101", 6, GUARDED, {"loss": ", ignore_index=-100"}),
    ("SA101", 11, ACCELERATE, {"end": COLLATOR}),
    ("SA102", 10, ACCELERATE, {"divided": " / args.accum"}),
    ("SA102", 6, EXACT, {"divided": " / accum"}),
    ("SA103", 7, GUARDED, {"divided": ""}),
    (
        "SA103",
        7,
        GUARDED.replace("loss.backward()", "accelerator.backward(loss)") + "accelerator = Accelerator()",
        {"divided": ""},
    ),
    ("SA104", 6, GUARDED, {}),
    ("SA201", 8, GUARDED, {"behind": "clip_grad_norm_(model.parameters(), 1.0)"}),
    ("SA201", 12, ACCELERATE, {"behind": "accelerator.clip_grad_norm_(model.parameters(), 1.0)"}),
    ("SA201", 10, INNER, {"behind": "clip_grad_norm_(model.parameters(), 1.0)"}),
    ("SA202", 5, GUARDED, {"head": "optimizer.zero_grad()"}),
    ("SA202", 9, ACCELERATE, {"head": "optimizer.zero_grad()", "empty": "pass"}),
    ("SA202", 7, INNER, {"head": "optimizer.zero_grad(); model.no_sync()"}),
    ("SA203", 8, GUARDED, {"behind": "ema.update(model)"}),
    ("SA204", 13, ACCELERATE.replace("model, optimizer, loader", "model, loader"), {}),
    ("SA301", 9, GUARDED, {"test": "i % k == 0 or i + 1 == len(loader)"}),
    ("SA302", 9, GUARDED, {"test": "(i + 1) % k == 0"}),
    ("SA302", 9, GUARDED, {"test": "i % k == k - 1"}),
    ("SA401", 5, ACCELERATE, {"length": "args.steps"}),
    ("SA401", 5, ACCELERATE, {"warmup": "args.warmup"}),
    ("SA402", 5, ACCELERATE, {"length": "len(loader) * 3"}),
    ("SA402", 5, ACCELERATE, {"length": "args.steps * args.accum"}),
    (
        "SA402",
        5,
        ACCELERATE.replace("num_warmup_steps={warmup}, num_training_steps=", "{warmup}, "),
        {"length": "len(loader) * 3"},
    ),
    ("SA402", 2, GUARDED, {"step": "scheduler.step(); ", "length": "len(train_loader) * 2"}),
    ("SA403", 8, GUARDED, {"behind": "scheduler.step()"}),
    ("SA403", 14, ACCELERATE, {"more": ""}),
    ("SA501", 9, INNER, {"head": "pass"}),
    ("SA502", 3, SAMPLER, {"told": "pass"}),
    ("SA503", 6, TWICE, {"sampler": "DistributedSampler"}),
    ("SA601", 4, TRAINER, {"k": ", gradient_accumulation_steps=4"}),
    ("SA602", 4, OWN_LOSS, {"loss": "cross_entropy(model(inputs))"}),
    ("SA602", 4, OWN_LOSS, {"loss": "super().compute_loss(model, inputs)", "taken": "**kwargs", "k": "8"}),
    ("SA602", 4, OWN_LOSS, {"loss": "cross_entropy(model(inputs))", "base": "trl.SFTTrainer"}),
    ("SA701", 7, REPORT, {"added": "loss.item()", "divisor": "len(loader)"}),
]
SILENT = [
    (GUARDED, {"loss": ', reduction="sum", ignore_index=-100', "divided": "/ count"}),
    (GUARDED, {"behind": "loss.item()", "step": "clip_grad_norm_(model.parameters(), 1.0); "}),
    (GUARDED, {"step": "ema.update(model); scheduler.step(); "}),
    (GUARDED, {"step": "scheduler.step(); ", "length": "len(train_loader) * 2 // k"}),
    (GUARDED, {"step": "scheduler.step(); ", "length": "len(dataset)"}),
    (GUARDED, {"test": "True"}),
    (GUARDED, {"behind": "scheduler.step()", "length": "len(loader)"}),
    (GUARDED, {"behind": "scheduler.step()", "length": "args.steps * accum_steps"}),
    (ACCELERATE, {"length": "args.steps", "end": "steps = args.steps / accelerator.num_processes"}),
    (ACCELERATE, {"behind": "if accelerator.sync_gradients: accelerator.clip_grad_norm_(model.parameters(), 1.0)"}),
    (ACCELERATE, {"k": "1", "divided": " / args.accum", "end": COLLATOR}),
    (ACCELERATE, {"length": "len(loader) * 3 // args.accum", "warmup": "100"}),
    (ACCELERATE, {"more": "", "tick": "if accelerator.sync_gradients: scheduler.step()"}),
    (ACCELERATE.replace("\nmodel, optimizer", "\nmodel, *rest = accelerator.prepare(*parts)\nmodel, optimizer"), {}),
    (INNER, {}),
    (SAMPLER, {}),
    (EXACT, {"divided": " / 2"}),
    (SAMPLER, {"told": "pass", "shuffle": ", shuffle=False"}),
    (TWICE, {}),
    (TRAINER, {}),
    (TRAINER, {"k": ", gradient_accumulation_steps=4", "more": "); import mymodels; print("}),
    (TRAINER, {"k": ", gradient_accumulation_steps=4", "load": ", trust_remote_code=True"}),
    (TRAINER, {"head": "CausalLM", "k": ", gradient_accumulation_steps=4"}),
    (TRAINER, {"k": ", gradient_accumulation_steps=4", "more": ", compute_loss_func=mine"}),
    (OWN_LOSS, {}),
    (OWN_LOSS, {"loss": "cross_entropy(model(inputs))", "k": "1"}),
    (OWN_LOSS, {"loss": "cross_entropy(model(inputs))", "base": "Learner"}),
    (OWN_LOSS, {"loss": "cross_entropy(model(inputs))", "made": "exact(MyTrainer)"}),
    (OWN_LOSS, {"loss": "cross_entropy(model(inputs)) / self.args.gradient_accumulation_steps"}),
    (OWN_LOSS, {"loss": "super().compute_loss(model, inputs, **kwargs)", "taken": "**kwargs"}),
    (REPORT, {}),
    (REPORT, {"added": "loss.item()", "divisor": "len(data)"}),
    (REPORT, {"loss": 'cross_entropy(model(x), y, reduction="sum")', "added": "loss.item()", "divisor": "len(loader)"}),
]  # fmt: skip


def make_program(template: str, other: dict[str, str]) -> str:
    base = next(values for key, values in RIGHT.items() if key[:70] == template[:70])
    return template.format(**base | other)


@pytest.mark.parametrize(("code", "line", "template", "other"), CASES)
def test_a_rule_speaks_of_its_line(code, line, template, other):
    found = {(finding.code, finding.line) for finding in lint_text(make_program(template, other), "a.py")}
    assert (code, line) in found
    assert {name for name, _ in found} <= {code, "SA104"}, "and of nothing else"


@pytest.mark.parametrize(("template", "other"), SILENT)
def test_a_rule_is_silent_where_the_loop_is_right(template, other):
    found = list(lint_text(make_program(template, other), "a.py"))
    assert [finding for finding in found if finding.code != "SA104"] == []


def test_every_rule_has_a_case():
    assert {case[0] for case in CASES} == set(RULES)


def test_it_accuses_none_of_the_sound_programs_of_the_audit():
    """Of those with a fault it names what lines show, under the name of a rule that fits."""
    sound = [
        finding for path in (ROOT / "tests/audited/sound").glob("*.py") for finding in reading.lint_file(path, "", "")
    ]
    assert [finding for finding in sound if not finding.is_harmless] == []
    named = {
        "accelerate_divided_twice": "SA102",
        "clip_per_micro_step": "SA201",
        "lambda_lr_counts_batches": "SA403",
        "ner_prepared_scheduler": "SA401",
        "not_divided_by_k": "SA103",
        "step_mod_k_is_0": "SA301",
        "zero_grad_per_micro_step": "SA202",
    }
    for name, code in named.items():
        found = reading.lint_file(ROOT / "tests/audited/faults" / f"{name}.py", "", "")
        assert code in {finding.code for finding in found if not finding.is_harmless}


@pytest.fixture
def red(tmp_path, monkeypatch):
    """Write a program with a fault into the folder that is the present one."""
    monkeypatch.chdir(tmp_path)
    flags = 'parser.add_argument("--batch_size")\nparser.add_argument("--accum")'
    text = make_program(GUARDED, {"behind": "clip_grad_norm_(model.parameters(), 1.0)"})
    (tmp_path / "red.py").write_text(text + flags)
    return tmp_path / "red.py"


def test_a_finding_for_people(red, capsys):
    assert lint(["red.py"], prog="samestep lint") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("red.py:6:16: SA104 note: the last window of an epoch has fewer")
    command = 'samestep audit-script --vary "batch_size=8,accum=1" --vary "batch_size=2,accum=4" -- red.py'
    assert lines[3:6] == [
        f"red.py:8:9: SA201 {RULES['SA201'].symptom}: clip_grad_norm_ (where k is more than 1)",
        f"    do: {RULES['SA201'].cure}",
        f"    run this audit to be sure: {command}",
    ]
    assert lines[-1].startswith("1 fault, 1 note in 1 file; docs/lint.md says more of SA104, SA201")


def test_rules_are_chosen(red, capsys):
    assert lint(["red.py", "--select", "SA104,SA301"]) == 0, "a note is no failure"
    assert lint(["red.py", "--ignore", "SA201", "--format", "json"]) == 0
    assert [row["code"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]] == ["SA104"]


@pytest.mark.parametrize(
    ("comment", "code"),
    [
        ("# stepaudit: ignore[SA201]", 0),
        ("# stepaudit: ignore", 0),
        ("# stepaudit: ignore[SA101, SA201]", 0),
        ("# stepaudit: ignore[SA101]", 1),
    ],
)
@pytest.mark.parametrize("place", ["behind", "above"])
def test_a_comment_silences(red, comment, code, place, capsys):
    lines = red.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines) if "clip_grad" in line)
    if place == "behind":
        lines[number] += f"  {comment}"
    else:
        lines.insert(number, comment)
        lines[number] = f"        {comment}"
    red.write_text("\n".join(lines))
    assert lint(["red.py"]) == code


def test_a_folder_a_notebook_and_what_is_no_program(red, capsys):
    lines = red.read_text().splitlines(keepends=True)
    cells = [
        {"cell_type": "markdown", "source": ["# A loop"]},
        {"cell_type": "code", "source": ["%pip install torch\n", *lines]},
    ]
    (red.parent / "red.ipynb").write_text(json.dumps({"cells": cells}))
    (red.parent / ".hidden").mkdir()
    (red.parent / ".hidden" / "red.py").write_text(red.read_text())
    assert lint([".", "--select", "SA201"]) == 1
    output = capsys.readouterr().out
    assert "red.ipynb:cell 2:9:9: SA201" in output
    assert "2 faults in 2 files" in output
    (red.parent / "broken.py").write_text("for\n")
    (red.parent / "broken.ipynb").write_text("[]")
    with pytest.raises(
        ValueError, match=r"broken.ipynb is no notebook.*\n.*broken.py is no Python program: line 1: invalid"
    ):
        lint(["."])
    assert "2 faults, 2 notes in 2 files" in capsys.readouterr().out, "what is found in the others is printed"


def test_what_only_ipython_reads_is_taken_out_and_a_bad_cell_is_named(red, capsys):
    odd = ["%%bash\nls *.py", "!pip install a \\\n  b", "files = !ls\nmodel?", "y = %time f()\n%matplotlib inline"]
    cells = [*odd, red.read_text(), "if x:\n    y = = 2"]
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    red.unlink()
    (red.parent / "usual.ipynb").write_text(json.dumps({"cells": code[:-1]}))
    assert lint(["usual.ipynb", "--select", "SA201"]) == 1
    assert "usual.ipynb:cell 5:8:9: SA201" in capsys.readouterr().out
    (red.parent / "usual.ipynb").write_text(json.dumps({"cells": code}))
    with pytest.raises(ValueError, match=r"usual.ipynb: cell 6 is no Python, and is not read: line 2: invalid syntax"):
        lint(["usual.ipynb", "--select", "SA201"])
    assert "SA201" in capsys.readouterr().out, "the others are read"
    with pytest.raises(ValueError, match="is neither a file"):
        lint(["nosuch.py"])
    (red.parent / "broken.py").write_text("for\n")
    with pytest.raises(ValueError, match="is no Python program"):
        lint(["broken.py"])
    assert "nothing found" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nosuch.py"], "nosuch.py is neither a file nor a folder"),
        (["red.py", "--select", "SA999"], "--select SA999 is no rule: valid names: SA101"),
        (["red.py", "--format", "xml"], "argument --format: invalid choice: 'xml'"),
        ([], "the following arguments are required: FILE"),
    ],
)
def test_bad_usage(red, words, message, capsys):
    with pytest.raises(ValueError, match=re.escape(message)):
        lint(words)


def test_sarif_has_what_github_needs(red, capsys):
    """The fields that GitHub's code scanning requires of a SARIF file, and rules that results point at."""
    assert lint(["red.py", "--format", "sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    assert (log["version"], "sarif-2.1.0" in log["$schema"]) == ("2.1.0", True)
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"]
    for rule in driver["rules"]:
        assert all(rule[name]["text"] for name in ("shortDescription", "fullDescription", "help"))
        assert rule["defaultConfiguration"]["level"] in ("note", "warning", "error")
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        assert result["partialFingerprints"]
        (location,) = result["locations"]
        place = location["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "red.py"
        assert place["region"]["startLine"] >= 1
        assert place["region"]["startColumn"] >= 1
    assert [result["level"] for result in run["results"]] == ["note", "warning"]
    assert json.loads(format_sarif([], 0))["runs"][0]["results"] == []


def test_it_needs_neither_torch_nor_an_installation(red):
    """As a hook starts it: by file, with another folder as the present one, and nothing on the path."""
    entry = ROOT / "stepaudit" / "lint" / "__main__.py"
    ended = subprocess.run([sys.executable, "-I", "-S", entry, "red.py"], capture_output=True, text=True)
    assert (ended.returncode, "SA201" in ended.stdout, ended.stderr) == (1, True, "")
    code = "import sys; from stepaudit.__main__ import main; main(); print({'torch', 'numpy'} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code, "lint", "red.py"], capture_output=True, text=True, cwd=ROOT)
    assert ended.stdout == "set()\n"
    assert "red.py is neither" in ended.stderr


def test_every_rule_has_its_section():
    text = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    for code, rule in RULES.items():
        assert f"### {code} {rule.name}\n" in text
        assert f"](#{anchor(code)})" in text


def test_the_heads_are_those_that_were_measured():
    """Nine of ten heads of these kinds, and more, are k times too large in Trainer."""
    from stepaudit.lint.programs import HEADS

    rows = json.loads((ROOT / "benchmarks/results/state.json").read_text(encoding="utf-8"))["heads"]
    verdicts = [row["verdict"] for row in rows if "verdict" in row and HEADS.fullmatch(row["head"])]
    assert len(verdicts) > 200
    assert sum(verdict == "k times too large" for verdict in verdicts) / len(verdicts) > 0.95
