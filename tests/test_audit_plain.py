"""--against plain: steps of one large batch that the audit makes, beside those of the program."""

import pytest

from stepaudit import script
from stepaudit.judge import compare
from stepaudit.plain import PlainRecorder
from stepaudit.record import EnoughSteps, Recorder

PROGRAM = """
import argparse
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--b", type=int)
parser.add_argument("--k", type=int)
flags = parser.parse_args(globals().get("words"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
inputs, labels = torch.randn(48, 6), torch.randint(0, 3, (48,))
labels[::5] = -100
counts = [(part != -100).sum() for part in labels.split(8)]
data = torch.utils.data.TensorDataset(inputs, labels)
loader = torch.utils.data.DataLoader(data, batch_size=flags.b)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (x, y) in enumerate(loader):
    total = counts[number // flags.k]
    loss = F.cross_entropy(model(x), y, reduction="sum") / total
    FAULT
    loss.backward()
    if number % flags.k == flags.k - 1:
        CLIP
        optimizer.step()
        optimizer.zero_grad()
"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.05)"


@pytest.fixture
def record(tmp_path):
    """Give record(b, k, fault, clip, kind), which records three steps of the program in this process."""

    def run(b, k, fault="pass", clip="pass", kind=Recorder):
        path = tmp_path / "train.py"
        path.write_text(PROGRAM.replace("FAULT", fault).replace("CLIP", clip))
        recorder, words = kind(3), ["--b", str(b), "--k", str(k)]
        with pytest.raises(EnoughSteps), recorder:
            exec(compile(path.read_bytes(), str(path), "exec"), {"__name__": "__main__", "words": words})
        return [recorder.recording]

    return run


def find_causes(reference, other):
    return [finding.cause for finding in compare(reference, other, 1e-5).findings]


@pytest.mark.parametrize("clip", ["pass", CLIP])
def test_a_right_program_takes_plain_steps(record, clip):
    """The same numbers, also behind clipping, whose norm is that of the plain gradient."""
    reference = record(8, 1, clip=clip, kind=PlainRecorder)
    for b, k in ((8, 1), (2, 4)):
        comparison = compare(reference, record(b, k, clip=clip), 1e-5)
        assert comparison.is_exact, comparison.findings
        assert max(comparison.errors) < 1e-6
        assert max(comparison.update_errors) < 1e-5


def test_plain_steps_do_not_depend_on_the_cut(record):
    """They are made of the micro-batches of any layout, right or wrong."""
    reference = record(8, 1, kind=PlainRecorder)
    other = record(2, 4, fault="loss = loss * total / 2", kind=PlainRecorder)
    assert compare(reference, other, 1e-5).is_exact


@pytest.mark.parametrize("fault", ["loss = 2 * loss", "loss = loss * total / 8"])
def test_what_is_wrong_under_every_cut_is_named(record, fault):
    """The layouts are exact beside each other; the second fault divides by all labels, also by those of -100."""
    first, second = record(8, 1, fault), record(2, 4, fault)
    assert compare(first, second, 1e-5).is_exact
    assert find_causes(record(8, 1, fault, kind=PlainRecorder), second) == ["factor"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("loss = loss + 0.1 * sum((p ** 2).sum() for p in model.parameters())", "a part that no loss function"),
        ("loss = model(x).square().mean()", "does not follow the loss functions"),
        ("loss = F.cross_entropy(model(x), y, reduction='none').mean()", "a loss for each target"),
    ],
)
def test_it_says_why_it_cannot(record, fault, reason):
    with pytest.raises(SystemExit, match=f"--against plain: .*{reason}"):
        record(8, 1, fault, kind=PlainRecorder)


def test_the_command_compares_the_first_layout_too(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM.replace("FAULT", "loss = 2 * loss").replace("CLIP", "pass"))
    words = ["--against", "plain", "--vary", "b=8,k=1", "--steps", "2", "--", str(path)]
    assert script.audit_script(words) == 1
    printed = capsys.readouterr().out
    assert "b 8, k 1, N 1, plain" in printed
    assert "2 times the gradient" in printed


def test_one_process_makes_it(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("pass")
    with pytest.raises(script.UsageError, match="let --processes begin with 1"):
        script.audit_script(["--against", "plain", "--processes", "2", "--vary", "b=8,k=2", "--", str(path)])
