"""The way of somebody with chats, as docs/language-models.md prints it: each of its commands, in order, on tiny weights."""

import contextlib
import json

import pytest
from chat_bases import GROUPED, make_tokenizer, save_base
from common import ROOT, evaluations, fresh_accelerator, load_benchmark
from printed import in_markdown
from transformers import AutoModelForCausalLM

from samestep import cli

TINY = "--max_seq_length 256 --global_batch_size 8 --num_generations 2 --generation_length 8 --speed safe"
"""What a small machine changes."""


def write_support(folder) -> None:
    """Write chats with a system prompt, a call of a tool and two answers, and pairs of answers."""
    tools = [
        {"type": "function", "function": {"name": "track", "description": "track it", "parameters": {"type": "object"}}}
    ]
    chats, pairs = [], []
    for number in range(300):
        call = {"type": "function", "function": {"name": "track", "arguments": {"parcel": number}}}
        turns = [
            {"role": "user", "content": f"Where is parcel {number}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": json.dumps({"place": "Ulm"})},
            {"role": "assistant", "content": "It is in Ulm."},
        ]
        chats.append({"messages": turns, "tools": tools} if number % 4 else {"messages": [turns[0], turns[3]]})
        good, bad = ([{"role": "assistant", "content": text}] for text in ("It is in Ulm.", "No idea."))
        pairs.append({"prompt": turns[:1], "chosen": good, "rejected": bad})
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def way(tmp_path_factory, scripts):
    """Run all commands in a folder; return it, and what each of the chats said."""
    folder = tmp_path_factory.mktemp("way")
    (folder / "Qwen").mkdir()
    template = load_benchmark("templates").templates()["qwen3"]  # Qwen3's own, which has no markers
    save_base(folder / "Qwen" / "Qwen3-0.6B", "qwen3", make_tokenizer(template), **GROUPED, head_dim=16)
    write_support(folder)
    commands = [
        command for command in in_markdown(ROOT / "docs" / "language-models.md") if "runs/support" in command.text
    ]
    said = []
    with contextlib.chdir(folder):
        for command in commands:
            words = list(command.words)
            if words[0] == "samestep":
                said.append(cli.main([*words[1:], "--max_new_tokens", "8"]))
                continue
            fresh_accelerator()
            argv = words[words.index("scripts/finetune_causal_lm.py") + 1 :]
            assert scripts["finetune_causal_lm"].main([*argv, *TINY.split()]) == 0, command.text
    assert len(commands) == 6
    return folder, said


def test_every_command_of_the_way_works(way):
    folder, said = way
    assert said == [0, 0]
    runs = {path.name for path in (folder / "runs").iterdir()}
    assert runs == {"support", "support-more", "support-dpo"}
    for name in runs:
        AutoModelForCausalLM.from_pretrained(
            folder / "runs" / "support" if name == "support" else folder / "Qwen/Qwen3-0.6B"
        )


def test_each_command_begins_where_the_one_before_ended(way):
    folder, _ = way
    first, more, dpo = (evaluations(folder / "runs" / name) for name in ("support", "support-more", "support-dpo"))
    assert more[0]["eval_loss"] == pytest.approx(first[-1]["eval_loss"], rel=1e-5)
    assert more[-1]["eval_loss"] < first[-1]["eval_loss"] < first[0]["eval_loss"]
    assert dpo[0]["eval_loss"] == pytest.approx(0.6931, rel=1e-3)
