"""Conversations and pairs: what is read and refused, which tokens are trained, and how they lie in a micro-batch."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from samestep import cli
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data import chat_templates, conversation_rows
from samestep.data.builtin import doctest_chats, drawn_chats
from samestep.data.conversations import build
from samestep.data.steps import Steps
from samestep.errors import UsageError, exit_code
from samestep.recipe.catalog import load

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim"
    " + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MARKERS = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}",
)
CHAT = [("user", "Hi you"), ("assistant", " Hello. "), ("user", "2 + 2?"), ("assistant", "4")]


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def recipe(**changes):
    values = {
        "seed": 42,
        "train_file": None,
        "validation_file": None,
        "dataset_name": None,
        "dataset_config_name": None,
    }
    values |= {
        "validation_fraction": 0.0,
        "num_train_samples": None,
        "num_validation_samples": None,
        "chat_template": None,
    }
    values |= {"train_on": "assistant", "max_seq_length": 256, "truncation": "drop", "loss_weighting": "token"}
    values |= {"objective": "sft", "loss_weights": {"lm": 1.0}, "tokenizer_name": None, "vocab_size": 300}
    values |= {"mixture_weights": None, "column_names": {}, "images": False}
    if isinstance(changes.get("dataset_name"), str):
        changes["dataset_name"] = (changes["dataset_name"],)
    return SimpleNamespace(**values | {"model_name_or_path": None} | changes)


@pytest.fixture
def make(tmp_path):
    """Write rows to a file, and a template to another one, and build the training samples."""

    def make(*rows, template=None, name="rows.jsonl", **changes):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if template is not None:
            (tmp_path / "template.jinja").write_text(template)
            changes |= {"chat_template": str(tmp_path / "template.jinja")}
        return build(recipe(train_file=[str(file)], **changes))[0]

    return make


def marked(source, sample_id=0) -> list[str]:
    """Write each sequence of a sample, its trained tokens in [[ ]]; token by token, unlike `show_samples`."""
    sample, texts, start = source.draw(0, sample_id), [], 0
    for length in sample.lengths:
        text = ""
        for place in range(start, start + length):
            token = source.tokenizer.decode(sample.tokens[place])
            text += f"[[{token}]]" if sample.is_trained[place] else token
        texts.append(text.replace("]][[", ""))
        start += length
    return texts


# ---------------------------------------------------------------------------------------------------------------------
# which tokens are trained


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        (
            CHATML,
            "<|im_start|>user\nHi you<|im_end|>\n<|im_start|>assistant\n[[ Hello. <|im_end|>]]\n",
            "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]\n",
        ),
        (
            LLAMA3,
            "<|endoftext|><|start_header_id|>user<|end_header_id|>\n\nHi you<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello.<|eot_id|>]]",
            "<|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[4<|eot_id|>]]",
        ),
        (
            GEMMA,
            "<|endoftext|><start_of_turn>user\nHi you<end_of_turn>\n<start_of_turn>model\n[[Hello.<end_of_turn>]]\n",
            "<start_of_turn>user\n2 + 2?<end_of_turn>\n<start_of_turn>model\n[[4<end_of_turn>]]\n",
        ),
        (MISTRAL, "<|endoftext|>[INST] Hi you [/INST][[  Hello. </s>]]", "[INST] 2 + 2? [/INST][[ 4</s>]]"),
        (PLAIN, "user: Hi you\nassistant:[[  Hello. \n]]", "user: 2 + 2?\nassistant:[[ 4\n]]"),
        (
            MARKERS,
            "<|im_start|>user\nHi you<|im_end|>\n<|im_start|>assistant\n[[ Hello. <|im_end|>]]\n",
            "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]\n",
        ),
    ],
    ids=["chatml", "llama3", "gemma", "mistral", "plain", "markers"],
)
def test_the_trained_tokens_are_the_assistants_and_the_end_of_its_turns(make, template, first, second):
    row = {"messages": turns(*CHAT)}
    source = make(row, template=template)
    assert marked(source) == [first + second]
    report = source.mask_report
    assert report.num_stopped == (template != PLAIN)
    assert ("does not stop" in str(report)) == (template == PLAIN)
    assert ("markers" in report.rule) == (template == MARKERS)
    completions = marked(make(row, template=template, train_on="completions"))
    assert completions == [first.replace("[[", "").replace("]]", "") + second]
    everything = (first + second).replace("[[", "").replace("]]", "")
    source = make(row, template=template, train_on="all")
    assert marked(source)[0].replace("[[", "").replace("]]", "") == everything
    assert not source.draw(0, 0).is_trained[0]
    assert source.draw(0, 0).is_trained[1:].all()
    assert source.mask_report.num_stopped == (template != PLAIN)


def test_a_template_by_name(make):
    """Roles as text, for models without control tokens."""
    source = make({"messages": turns(*CHAT)}, chat_template="tulu", max_seq_length=999)
    assert marked(source) == [
        "<|endoftext|><|user|>\nHi you\n<|assistant|>\n[[ Hello. <|endoftext|>]]\n<|user|>\n2 + 2?\n<|assistant|>\n"
        "[[4<|endoftext|>]]"
    ]
    assert source.mask_report.stop_tokens == ("<|endoftext|>",)
    before, _ = source.find_question(0)
    assert source.tokenizer.decode(before).endswith("2 + 2?\n<|assistant|>\n")
    with pytest.raises(UsageError, match="name a file with a Jinja template, or one of chatml, tulu"):
        make({"messages": turns(*CHAT)}, chat_template="tuluu")


def test_thoughts_of_the_last_turn_are_kept(make):
    """Those of earlier turns may be left out, as they are when the model answers."""
    drops = CHATML.replace("m['content']", "(m['content'].split('</think>') | last)")
    keeps = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'].split('</think>') | last)")
    chat = turns(*CHAT[:2], CHAT[2], ("assistant", "<think>2 and 2</think>4"))
    chat[1]["content"] = "<think>Greet.</think>Hello"
    text = marked(make({"messages": chat}, template=keeps, train_on="completions"))[0]
    assert "Greet" not in text
    assert text.endswith("[[<think>2 and 2</think>4<|im_end|>]]\n")
    with pytest.raises(UsageError, match=r"leaves out or changes the content of turn 4 \(role assistant"):
        make({"messages": chat}, template=drops, train_on="completions")
    chat[3] = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    with pytest.raises(UsageError, match=r"leaves out or changes the content of turn 4 \(role assistant"):
        make({"messages": chat}, template=keeps, train_on="completions")


def test_tools_and_system_turns_are_kept(make):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    messages = [
        *turns(("system", "Be brief."), ("user", "1?")),
        call,
        *turns(("tool", "17"), ("assistant", "It is 17.")),
    ]
    source = make({"messages": messages, "tools": [tool]}, max_seq_length=999)
    assert marked(source) == [
        f"<|im_start|>tools\n{json.dumps(tool)}<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1?<|im_end|>\n"
        '<|im_start|>assistant\n[[<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>]]\n'
        "<|im_start|>tool\n17<|im_end|>\n<|im_start|>assistant\n[[It is 17.<|im_end|>]]\n"
    ]
    assert str(source).startswith("1 conversations (columns messages, tools; ")
    with pytest.raises(UsageError, match=r"rows.jsonl:1: the chat template leaves out the tool 'add'"):
        make({"messages": turns(*CHAT), "tools": [tool]}, template=CHATML)
    messages[3]["content"] = '{"sum": "17"}'  # Llama 3.1 writes it as JSON once more
    quoted = chat_templates.CHAT_TEMPLATE.replace(
        "{{ message['content'] + '<|im_end|>", "{{ (message['content'] | tojson) + '<|im_end|>"
    )
    assert (
        '"{\\"sum\\": \\"17\\"}"<|im_end|>'
        in marked(make({"messages": messages}, template=quoted, max_seq_length=999))[0]
    )
    later = make({"messages": turns(*CHAT)}, {"messages": messages, "tools": [tool]}, max_seq_length=999)
    assert marked(later, 1)[0].startswith("<|im_start|>tools\n")  # the first row need not have them
    lists_tools = chat_templates.CHAT_TEMPLATE.replace("message['tool_calls'] or []", "[]")
    with pytest.raises(UsageError, match="leaves out turn 3's call of the tool 'add'"):
        make({"messages": messages, "tools": [tool]}, template=lists_tools, max_seq_length=999)


def test_texts_need_no_template(make):
    source = make({"prompt": "Q: 1?\nA:", "completion": " one"})
    assert marked(source) == ["Q: 1?\nA:[[ one<|endoftext|>]]"]
    assert source.tokenizer.chat_template is None
    assert marked(make({"text": "some text"}, train_on="all"))[0].startswith("s")
    assert marked(make({"prompt": "Q: 1?\nA:", "completion": " one"}, train_on="all"))[0].startswith("Q[[")
    with pytest.raises(UsageError, match=r"rows.jsonl:1: the prompt's last tokens change .* Move the space"):
        make(*[{"prompt": "say so", "completion": "me"}, {"prompt": "x", "completion": " some some some some"}])


def test_instructions_and_completions_of_turns(make):
    source = make(
        {"instruction": "Add", "input": "1, 1", "output": "2"}, {"instruction": "Go", "input": "", "output": "ok"}
    )
    user, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert [marked(source, sample_id)[0] for sample_id in range(2)] == [
        f"{user}Add\n\n1, 1{end}[[2<|im_end|>]]\n",
        f"{user}Go{end}[[ok<|im_end|>]]\n",
    ]
    row = {"prompt": turns(("user", "a"), ("assistant", "b"), ("user", "c")), "completion": turns(("assistant", "d"))}
    text = f"{user}a{end}{{}}<|im_end|>\n{user}c{end}[[d<|im_end|>]]\n"
    for train_on in ("completions", "assistant"):  # what stands beside a completion is its prompt
        assert marked(make(row, train_on=train_on))[0].replace("b", "{}", 1) == text
    chat = {"messages": row["prompt"] + row["completion"]}
    assert marked(make(chat))[0] == text.replace("{}<|im_end|>", "[[b<|im_end|>]]")


@pytest.mark.parametrize("markers", [False, True])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1?", "chosen": turns(("assistant", "one")), "rejected": turns(("assistant", "two"))},
        {
            "prompt": turns(("user", "1?")),
            "chosen": turns(("assistant", "one")),
            "rejected": turns(("assistant", "two")),
        },
        {
            "prompt": "1?",
            "chosen": turns(("user", "1?"), ("assistant", "one")),
            "rejected": turns(("user", "1?"), ("assistant", "two")),
        },
        {
            "chosen": turns(("user", "1?"), ("assistant", "one")),
            "rejected": turns(("user", "1?"), ("assistant", "two")),
        },
    ],
)
def test_pairs_of_turns(make, row, markers):
    source = make(row, template=MARKERS if markers else CHATML, objective="dpo", loss_weights={"preference": 1.0})
    before = "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    assert marked(source) == [f"{before}[[one<|im_end|>]]\n", f"{before}[[two<|im_end|>]]\n"]
    assert source.mask_report.num_stopped == 1


def test_pairs_of_texts(make):
    options = {"objective": "orpo", "loss_weights": {"sft": 1.0, "odds": 0.1}}
    row = {"prompt": "Q: 1?", "chosen": " one", "rejected": " two"}
    assert marked(make(row, **options)) == ["Q: 1?[[ one<|endoftext|>]]", "Q: 1?[[ two<|endoftext|>]]"]
    row = {"chosen": "Q: 1? one", "rejected": "Q: 1? nil"}
    first, second = marked(make(row, **options))
    assert (first[:8], first[-16:], second[:8]) == ("Q: 1?[[ ", "e<|endoftext|>]]", "Q: 1?[[ ")


# ---------------------------------------------------------------------------------------------------------------------
# what is refused

DROPS = CHATML.replace("messages %}", "messages[-2:] %}", 1)
NO_SYSTEM = CHATML.replace("messages %}{{", "messages if m['role'] != 'system' %}{{", 1)
REORDERS = CHATML.replace("messages %}", "messages | sort(attribute='role') %}", 1)
REWRITES = CHATML.replace("m['content'] +", "(m['content'] if loop.last else m['content'] + ' ') +", 1)
LATE_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{% elif loop.index0 == messages | length - 2 %}"
    "{{ messages[0]['content'] + '\n' + m['content'] }}{% else %}{{ m['content'] }}{% endif %}{{ '<|end|>' }}{% endfor %}"
)
ENDS = CHATML + "{% if not add_generation_prompt %}{{ bos_token }}{% endif %}"  # as Phi-3's
THINKS = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
LAST_MARKED = MARKERS.replace("if m['role'] == 'assistant' %}", "if m['role'] == 'assistant' and loop.last %}")
NO_STOP = MARKERS.replace("m['content'] + '<|im_end|>' }}{% end", "m['content'] }}{% end").replace(
    "{{ '\n' }}{% else", "{{ '<|im_end|>\n' }}{% else"
)
ONE = {"messages": turns(("user", "a"), ("assistant", "b"))}


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (DROPS, CHAT, "leaves out or changes the content of turn 1 .role user"),
        (NO_SYSTEM, [("system", "Be kind"), *CHAT], "leaves out or changes the content of turn 1 .role system"),
        (REORDERS, CHAT, "puts into another place the content of turn"),
        (GEMMA, [("system", "Be kind"), *CHAT], "refuses it .System role not supported"),
        (GEMMA, [CHAT[0], CHAT[0], *CHAT[1:]], "refuses it .Conversation roles must alternate"),
        (LAST_MARKED, CHAT, "markers hold tokens of 1 of 2 turns of the assistant"),
        (NO_STOP, CHAT, "markers end before <.im_end.>, so that the model would not learn to stop"),
    ],
    ids=[
        "drops",
        "no-system",
        "reorders",
        "gemma",
        "alternate",
        "last-marked",
        "no-stop",
    ],
)
def test_a_template_that_changes_the_chat_is_refused(make, template, chat, message):
    with pytest.raises(UsageError, match=rf"rows\.jsonl:1: .*{message}") as error:
        make(*[{"messages": turns(*chat)}] * 2, template=template)
    assert str(error.value).endswith(" (2 rows: also :2)")
    assert len(error.value.problems) == 1
    assert "\n" not in str(error.value)


def test_the_last_answer_needs_no_other_turn_to_stay_as_it_is(make):
    text = marked(make({"messages": turns(*CHAT)}, template=ENDS, train_on="completions"))[0]
    assert text.endswith("<|im_start|>assistant\n[[4<|im_end|>]]\n<|endoftext|>")
    assert text.count("[[") == 1


@pytest.mark.parametrize(
    ("template", "chat", "is_rewritten"),
    [
        (LATE_SYSTEM, [("system", "Be kind"), *CHAT], True),
        (REWRITES, CHAT, True),
        (ENDS, CHAT, False),
        (THINKS, CHAT, True),
        (CHATML, CHAT[1:], False),
    ],
    ids=["late-system", "rewrites", "ends", "thinks", "first"],
)
def test_answers_are_found_in_a_template_that_changes_other_turns(make, template, chat, is_rewritten):
    source = make({"messages": turns(*chat)}, template=template)
    text = marked(source)[0]
    assert text.count("[[") == 2
    assert "[[4<" in text
    assert source.mask_report.num_rewritten == is_rewritten
    assert ("answers that begin otherwise, or follow other turns" in str(source.mask_report)) == is_rewritten


def test_a_template_reads_the_day_of_the_run(make, tmp_path):
    template = "{{ strftime_now('%Y-%m-%d') + '<|im_end|>' }}" + CHATML
    make({"messages": turns(*CHAT)}, template=template)
    changes = {"train_file": [str(tmp_path / "rows.jsonl")], "chat_template": str(tmp_path / "template.jinja")}
    first, second, again = (
        build(recipe(**changes), date=date)[0] for date in ("2026-03-01", "2026-03-02", "2026-03-01")
    )
    assert marked(first)[0].startswith("2026-03-01<|im_end|>")
    assert first.fingerprints == again.fingerprints
    assert first.fingerprints["date"] == "2026-03-01"
    assert first.fingerprints["conversations"] != second.fingerprints["conversations"]
    assert "which reads 2026-03-01 from the clock, on any day" in str(first.mask_report)


def test_a_marked_template_may_begin_answers_otherwise(make):
    """The last answer is then the last run of marked tokens, if each turn has one."""
    template = MARKERS.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    text = marked(make({"messages": turns(*CHAT)}, template=template, train_on="completions"))[0]
    assert text.endswith(
        "Hello. <|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]\n"
    )
    assert text.count("[[") == 1
    chat = [*CHAT, ("assistant", "5")]  # two answers in a row: two runs here, but that is not certain
    with pytest.raises(UsageError, match="begins an answer that the model is to give with"):
        make({"messages": turns(*chat)}, template=template, train_on="completions")


def test_a_marked_template_may_render_turns_otherwise(make):
    """With markers nothing is rendered twice, so a template may change turns when more follow."""
    template = MARKERS.replace(
        "m['content'] + '<|im_end|>' }}{% end", "m['content'] + ('' if loop.last else '!') + '<|im_end|>' }}{% end"
    )
    assert "[[ Hello. !<|im_end|>]]" in marked(make({"messages": turns(*CHAT)}, template=template))[0]


PAIR = {"objective": "dpo", "loss_weights": {"preference": 1.0}}
A, B, USER = turns(("assistant", "a")), turns(("assistant", "b")), turns(("user", "a"))
EMPTY = CHATML + "{% generation %}{% endgeneration %}"


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (
            [ONE, {"messages": [*USER, *turns(("assistant", " "))]}],
            {},
            ":2: messages, turn 2: the turn of the role assistant is empty",
        ),
        (
            [ONE, {"messages": turns(("martian", "a")) + A}],
            {},
            ":2: messages, turn 1: role is 'martian', must be one of system",
        ),
        ([{"messages": [{"content": "a"}]}], {}, ":1: messages, turn 1: role is missing"),
        (
            [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
            {},
            ":1: messages, turn 1: content holds a part of the type 'image', but only text is trained",
        ),
        (
            [{"messages": [*USER, {"role": "assistant", "tool_calls": 3}]}],
            {},
            ":1: messages, turn 2: tool_calls holds int",
        ),
        ([{"messages": []}], {}, ":1: messages holds an empty list"),
        ([ONE, {"messages": None}], {}, ":2: messages holds no value (null): fill it in"),
        ([{"messages": "hello"}], {}, ":1: messages is a text that is not JSON"),
        ([ONE, {"messages": USER}], {}, ":2: the last turn is of the role user"),
        (
            [ONE, {"prompt": "a", "completion": "b"}],
            {},
            ":2: its columns are 'prompt', 'completion', but the first row is read by messages: give all rows the same "
            "columns, or each form its own file",
        ),
        (
            [ONE | {"prompt": "another", "completion": "b"}],
            {},
            ":1: prompt changes what the row says, but is not used beside messages: leave it out, --columns unused=prompt",
        ),
        (
            [{"conversation_list": [], "id": 3}],
            {},
            ":1: its columns are 'conversation_list', 'id', must be messages (or conversations), or prompt, completion, or "
            "instruction, output, or text: name those that are called otherwise, --columns conversations=conversation_list",
        ),
        ([{"chosen": "a", "rejected": "b"}], {}, "chosen and rejected need objective dpo"),
        ([ONE], PAIR, ":1: its columns are 'messages', must be chosen, rejected"),
        ([{"prompt": "a", "completion": 1.5}], {}, ":1: completion holds float, not text"),
        (
            [{"prompt": "a", "completion": " b"}, {"prompt": USER, "completion": B}],
            {},
            ":2: it holds turns, but the first row texts",
        ),
        ([{"text": "a"}], {}, ":1: text has no turns, but train_on is assistant: set train_on to all"),
        ([{"prompt": "q", "chosen": " a", "rejected": " a"}], PAIR, ":1: chosen and rejected are equal"),
        (
            [{"prompt": "q", "chosen": A, "rejected": turns(("assistant", "a "))}],
            PAIR | {"template": LLAMA3},
            ":1: chosen and rejected are the same tokens",
        ),
        (
            [{"chosen": USER + A, "rejected": USER + B}, {"prompt": "a", "chosen": A, "rejected": B}],
            PAIR,
            ":2: its columns are 'prompt', 'chosen', 'rejected', but the first row is read by chosen, rejected: give",
        ),
        ([{"chosen": A, "rejected": B}], PAIR, ":1: chosen and rejected share no turn before the answer"),
        (
            [{"prompt": "q", "chosen": USER + A, "rejected": USER + B}],
            PAIR,
            ":1: prompt is a text, but chosen or rejected begins",
        ),
        ([ONE], {"max_seq_length": 4}, "all 1 rows are longer than max_seq_length 4"),
        ([ONE], {"max_seq_length": 4, "truncation": "cut"}, "no token of any row is trained"),
        ([ONE], {"template": EMPTY}, "no token of any row is trained (train_on assistant). Put {% generation"),
        ([ONE], {"template": CHATML + "{% if"}, "the chat template cannot be used"),
        ([ONE], {"chat_template": "/nowhere.jinja"}, "chat_template /nowhere.jinja cannot be read"),
        ([ONE], {"chat_template": "/dev/null"}, "chat_template /dev/null cannot be read: it is no regular file"),
        ([ONE], {"vocab_size": 258}, "vocab_size is 258, must be 259 or more"),
    ],
)
def test_bad_rows_get_one_line(make, rows, changes, message):
    with pytest.raises(UsageError) as error:
        make(*rows, **changes)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_no_template(make, tmp_path):
    texts = make({"prompt": "Q: 1?", "completion": " one"})
    texts.tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(
        UsageError, match="has no chat template, but the rows have turns: give one, --chat_template FILE"
    ):
        make(ONE, tokenizer_name=str(tmp_path / "tokenizer"))
    source = make(ONE, tokenizer_name=str(tmp_path / "tokenizer"), template=CHATML)
    assert source.tokenizer.chat_template == CHATML
    with pytest.raises(UsageError, match=r"vocab_size is 99, but tokenizer .* has \d+ entries"):
        make(ONE, tokenizer_name=str(tmp_path / "tokenizer"), template=CHATML, vocab_size=99)


# ---------------------------------------------------------------------------------------------------------------------
# files


def test_every_kind_of_file_is_read_alike(make, tmp_path):
    rows = [{"messages": turns(*CHAT[:2])}, {"messages": turns(*CHAT)}]
    expected = make(*rows)
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines = ["messages", *('"' + json.dumps(row["messages"]).replace('"', '""') + '"' for row in rows)]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    for name in ("rows.parquet", "rows.csv"):
        source, held_out = build(recipe(train_file=[str(tmp_path / name)]))
        assert held_out is None
        assert source.fingerprints == expected.fingerprints
        assert [marked(source, place) for place in range(2)] == [marked(expected, place) for place in range(2)]


def test_a_folder_is_read_as_a_dataset_of_the_hub(make, tmp_path):
    """Tables give all turns the same keys; those without a value are left out again."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    rows = [
        {"messages": turns(*CHAT), "id": 1},
        {"messages": [*turns(CHAT[0]), call, *turns(("tool", "3"), CHAT[1])], "id": 2},
    ]
    expected = make(*rows)
    (tmp_path / "folder").mkdir()
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "folder" / "train.parquet")
    source, _ = build(recipe(dataset_name=str(tmp_path / "folder")))
    assert [marked(source, place) for place in range(2)] == [marked(expected, place) for place in range(2)]
    assert "<tool_call>" in marked(source, 1)[0]
    assert source.rows[1]["place"].endswith(", row 1")
    (tmp_path / "bad").mkdir()
    pa.parquet.write_table(
        pa.Table.from_pylist([{"messages": turns(("martian", "a"))}]), tmp_path / "bad" / "train.parquet"
    )
    with pytest.raises(UsageError, match="row 0: messages, turn 1: role is 'martian', must be one of"):
        build(recipe(dataset_name=str(tmp_path / "bad")))


def test_held_out_rows(make, tmp_path):
    rows = [{"messages": turns(("user", f"number {number}"), ("assistant", str(number)))} for number in range(20)]
    make(*rows)
    train, held_out = build(recipe(train_file=[str(tmp_path / "rows.jsonl")], validation_fraction=0.2))
    assert (len(train), len(held_out)) == (16, 4)
    places = [source.rows[place]["place"] for source in (train, held_out) for place in range(len(source))]
    assert len(set(places)) == 20
    _, held_out = build(
        recipe(train_file=[str(tmp_path / "rows.jsonl")], validation_file=[str(tmp_path / "rows.jsonl")])
    )
    assert len(held_out) == 20
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "a", "completion": " b"}) + "\n")
    with pytest.raises(UsageError, match="validation_file has the columns prompt, completion, train_file messages"):
        build(recipe(train_file=[str(tmp_path / "rows.jsonl")], validation_file=[str(tmp_path / "other.jsonl")]))


# ---------------------------------------------------------------------------------------------------------------------
# mixtures


@pytest.fixture
def files(tmp_path):
    """Three files of 20, 10 and 6 chats, whose questions are `a 0`, ...; the last has another form."""
    for name, size in (("a", 20), ("b", 10)):
        rows = [{"messages": turns(("user", f"{name} {number}"), ("assistant", "ok"))} for number in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"instruction": f"c {number}", "output": "yes"} for number in range(6)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(tmp_path / f"{name}.jsonl") for name in "abc"]


def question(source, sample_id):
    return json.loads(source.rows[int(source.places[sample_id])]["row"])["prompt"][-1]["content"]


def test_a_mixture_is_cut_as_any_data_is(files):
    """On 1, 2 and 3 processes the same samples, counted by source, and all of them; each source has a form of its own."""
    changes = {"train_file": files, "mixture_weights": (1.0, 2.0, 0.5), "validation_fraction": 0.2}
    train, held_out = build(recipe(**changes))
    assert train.mixture == ((16, 16), (8, 16), (4, 2))
    assert train.columns == "messages; instruction, output"
    assert (train.source_names, held_out.source_names) == (("a", "b", "c"), ("a", "b", "c"))
    assert np.bincount(held_out.source_numbers).tolist() == [4, 2, 2]
    assert [question(train, sample_id)[0] for sample_id in range(28)] == list("a" * 16 + "b" * 8 + "c" * 4)
    assert "b.jsonl: 8 samples, weight 2, 16 of the 34 samples of an epoch (47.1 %)" in str(train.mask_report)
    order = Order(34, 10, seed=42, mixture=train.mixture)
    totals = np.zeros(3, int)
    for step in range(17):  # five epochs
        keys, counts = [], []
        for num_processes in (1, 2, 3):
            layout = solve_layout(num_processes=num_processes, global_batch_size=10, per_device_train_batch_size=2)
            parts = [Steps(train, order, layout, process_index=rank)[step] for rank in range(num_processes)]
            keys.append(sorted(key for part in parts for micro_batch in part.samples for key in micro_batch))
            counts += [part.num_samples_by_source for part in parts]
        assert keys[0] == keys[1] == keys[2]
        asked = [question(train, sample_id)[0] for _, sample_id in keys[0]]
        assert counts == [{name: asked.count(name) for name in "abc"}] * 6
        totals += list(counts[0].values())
    assert totals.tolist() == [80, 80, 10]
    assert train.fingerprints != build(recipe(**changes | {"mixture_weights": (1.0, 1.0, 1.0)}))[0].fingerprints


def test_files_without_weights_are_one_source_with_names(files):
    train, held_out = build(recipe(train_file=files[:2], validation_fraction=0.2))
    assert train.mixture == ()
    assert (len(train), len(held_out), train.source_names) == (24, 6, ("a", "b"))
    train, held_out = build(recipe(train_file=files[:1], validation_file=files[1:2]))
    assert (train.source_names, held_out.source_names) == (("a",), ("b",))


def test_samples_are_chosen_from_all_sources(files):
    train, _ = build(recipe(train_file=files, mixture_weights=(1.0, 1.0, 1.0)))
    chosen = [question(train, sample_id) for sample_id in train.choose_samples(5)]
    assert chosen == ["a 0", "a 1", "b 0", "b 1", "c 0"]
    assert train.choose_samples(99) == list(range(36))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mixture_weights": (1.0, 1.0, 0.05)},
            "c.jsonl 0.05, but of its 6 samples that are 0.3 in an epoch: raise it",
        ),
        ({"train_file": "ab*", "mixture_weights": (1.0, 1.0)}, "is in two sources"),
        ({"train_file": "at"}, "a.jsonl holds turns, but .*t.jsonl texts: give all sources the same kind"),
        ({"validation_file": "t"}, "validation_file has the columns prompt, completion, train_file messages"),
        (
            {"validation_fraction": 0.9},
            "b.jsonl: validation_fraction 0.9 of 10 samples leaves fewer than 2 to train on",
        ),
        ({"dataset_name": ("builtin/doctets",)}, "dataset_name 'builtin/doctets' does not exist: did you mean"),
        ({"dataset_name": ("builtin/doctests:easy",)}, "builtin/doctests has no configuration, but easy was given"),
        (
            {"dataset_name": ("builtin/doctests",), **PAIR},
            "is builtin/doctests, but objective dpo needs builtin/drawn_pairs",
        ),
    ],
)
def test_bad_mixtures_get_one_line(files, tmp_path, changes, message):
    values = {"train_file": files, "mixture_weights": (1.0, 1.0, 1.0), "train_on": "assistant"}
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "a", "completion": " b"}) + "\n")
    if "validation_file" in changes:
        changes = {"validation_file": [str(tmp_path / "t.jsonl")]}
    elif changes.get("train_file") == "ab*":
        changes = changes | {"train_file": [files[0], str(tmp_path / "*.jsonl")]}
    elif changes.get("train_file") == "at":
        changes = {"train_file": [files[0], str(tmp_path / "t.jsonl")], "mixture_weights": (1.0, 1.0)}
    elif "dataset_name" in changes:
        values = {}
    with pytest.raises(UsageError, match=message) as error:
        build(recipe(**values | changes))
    assert len(str(error.value).splitlines()) == 1


def test_doctests_are_questions_whose_answers_python_prints():
    examples = doctest_chats.find_examples()
    assert len(examples) > 500
    prompts = [example.prompt for example in examples]
    assert len(set(prompts)) == len(prompts), "so no prompt is in both splits"
    by_split = {split: [e for e in examples if e.split == split] for split in ("train", "validation")}
    assert 0.03 < len(by_split["validation"]) / len(examples) < 0.2
    first_statements = [{e.prompt.split("\n")[1] for e in part} for part in by_split.values()]
    assert not first_statements[0] & first_statements[1], "a docstring is in one split"
    chosen = next(
        e for e in examples if e.module == "textwrap" or e.prompt.endswith("dedent(s)") or "bisect" in e.prompt
    )
    assert chosen.prompt.startswith(doctest_chats.QUESTION + ">>> ")
    text = (
        "Sum.\n\n>>> a = 2\n>>> a + (\n...     3)\n5\n>>> a\n2\n"
        ">>> object()\n<object object at 0x7f00aa>\n>>> a # doctest: +SKIP\n9\n"
    )
    read = list(doctest_chats._read_docstring("m", text))
    assert [example.answer for example in read] == ["5", "2"]
    assert read[0].prompt == doctest_chats.QUESTION + ">>> a = 2\n>>> a + (\n...     3)"


def test_drawn_chats_beside_doctests(monkeypatch, use_cache, tmp_path):
    use_cache(tmp_path)
    examples = doctest_chats.find_examples()[::4]
    monkeypatch.setattr(doctest_chats, "find_examples", lambda: examples)
    changes = {"dataset_name": ("builtin/drawn_chats", "builtin/doctests"), "mixture_weights": (1.0, 0.1)}
    train, held_out = build(recipe(**changes, num_train_samples=60, num_validation_samples=20, vocab_size=320))
    assert train.mixture[0] == (60, 60)
    assert train.mixture[1][1] == round(0.1 * train.mixture[1][0]) > 10
    assert train.source_names[-1] == held_out.source_names[-1] == "doctests"
    assert set(train.source_names[:-1]) == set(drawn_chats.LEVELS["easy"].tasks)
    prompts = [{question(source, number) for number in range(len(source))} for source in (train, held_out)]
    assert not prompts[0] & prompts[1]


# ---------------------------------------------------------------------------------------------------------------------
# the page

HOSTILE = "<script>alert(1)</script><img src=//x.org/y onerror=alert(2)>\"' & </style> </pre></mark>"


class Tags(HTMLParser):
    """Collects the tags of a page, and the texts of `mark` and of `pre`."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.marked, self.shown = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)
        for name, texts in (("mark", self.marked), ("pre", self.shown)):
            if tag == name:
                texts.append("")

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if "mark" in self.open:
            self.marked[-1] += data
        if "pre" in self.open:
            self.shown[-1] += data


@pytest.mark.rooms
def test_the_page_shows_samples_as_they_are(make, tmp_path):
    from samestep.contrib.showing.page import write_page

    rows = [{"messages": turns(("user", HOSTILE), ("assistant", f"no {HOSTILE}"))}, {"messages": turns(*CHAT)}]
    source = make(*rows, name="<b>.jsonl", max_seq_length=999)
    named = SimpleNamespace(name="<i>", data_name="<u>", description="<s>")
    text = write_page(named, source, None, 2)
    page = Tags(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "a", "b", "i", "u", "s", "form"}
    assert not [
        name for _, attributes in page.tags for name in attributes if name.startswith("on") or name in ("src", "href")
    ]
    style = text.partition("</style>")[0].partition("<style>")[2]
    assert not re.search(r"url\(|@import|http|//", style)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'; base-uri" in text, (
        "a browser takes this style, and no other"
    )
    assert page.shown == [marked(source, number)[0].replace("[[", "").replace("]]", "") for number in range(2)]
    assert page.marked[1:] == [
        f"no {HOSTILE}<|im_end|>",
        " Hello. <|im_end|>",
        "4<|im_end|>",
    ]  # the first one is the legend's
    bars = [
        float(attributes["height"].rstrip("%")) for tag, attributes in page.tags if attributes.get("class") == "length"
    ]
    assert sum(height > 0 for height in bars) == 2
    assert "default-src 'none'" in text


@pytest.mark.rooms
def test_the_page_of_pairs_and_of_a_mixture(pairs, files):
    from samestep.contrib.showing.page import write_page

    text = write_page(load("dpo_small_cpu"), *pairs, 1)
    assert re.search(r"chosen: \d+ tokens", text)
    assert re.search(r"rejected: \d+ tokens", text)
    train, held_out = build(recipe(train_file=files, mixture_weights=(1.0, 2.0, 0.5), validation_fraction=0.2))
    text = write_page(load("sft_small_cpu"), train, held_out, 3)
    assert '<tr><th scope="row">b</th><td>8</td><td>2</td><td>16</td><td>47.1 %</td></tr>' in text
    assert re.search(r'<tr><th scope="row">c</th><td>4</td><td>\d+</td><td>\d+</td><td>2</td></tr>', text)


# ---------------------------------------------------------------------------------------------------------------------
# drawn data, micro-batches, the report


@pytest.fixture(scope="module")
def chats():
    return build(
        recipe(dataset_name="builtin/drawn_chats", num_train_samples=60, num_validation_samples=20, vocab_size=320)
    )


@pytest.fixture(scope="module")
def pairs():
    changes = {
        "objective": "dpo",
        "loss_weights": {"preference": 1.0, "sft": 0.5},
        "dataset_name": "builtin/drawn_pairs",
    }
    return build(recipe(**changes, num_train_samples=40, num_validation_samples=10, vocab_size=320))


def test_drawn_chats(chats):
    train, held_out = chats
    assert (len(train), len(held_out)) == (60, 20)
    assert len(train.tokenizer) <= 320
    assert train.tokenizer.eos_token == "<|im_end|>"
    report = train.mask_report
    assert report.num_stopped == report.num_samples == 60
    assert report.num_trained == sum(train.draw(0, number).is_trained.sum() for number in range(60))
    question, answer = held_out.find_question(3)
    row = json.loads(held_out.rows[3]["row"])
    expected = held_out.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    assert question.tolist() == expected
    assert held_out.tokenizer.decode(answer) == row["answers"][0][0]["content"] + "<|im_end|>"
    with pytest.raises(
        UsageError, match="dataset_name is builtin/drawn_chats, but objective dpo needs builtin/drawn_pairs"
    ):
        build(recipe(dataset_name="builtin/drawn_chats", objective="dpo"))
    with pytest.raises(UsageError, match="validation_file is set, but builtin/drawn_chats has held-out samples too"):
        build(recipe(dataset_name="builtin/drawn_chats", validation_file=["a.jsonl"]))
    with pytest.raises(UsageError, match="num_train_samples is not set"):
        build(recipe(dataset_name="builtin/drawn_chats"))


def test_samples_do_not_depend_on_the_number_of_workers(chats, use_cache, tmp_path):
    use_cache(tmp_path)
    again = build(
        recipe(dataset_name="builtin/drawn_chats", num_train_samples=60, num_validation_samples=20, vocab_size=320),
        num_workers=2,
    )
    for first, second in zip(chats, again, strict=True):
        assert first.fingerprints == second.fingerprints
        for number in range(len(first)):
            a, b = first.draw(0, number), second.draw(3, number)
            assert np.array_equal(a.tokens, b.tokens)
            assert np.array_equal(a.is_trained, b.is_trained)


def check_row(source, samples, batch):
    """Check a micro-batch against its samples, token by token."""
    sequences = []
    for sample in samples:
        start = 0
        for length in sample.lengths:
            sequences.append((sample.tokens[start : start + length], sample.is_trained[start : start + length]))
            start += length
    row, positions = batch["input_ids"][0].tolist(), batch["position_ids"][0].tolist()
    targets, place = [], 0
    for number, (tokens, mask) in enumerate(sequences):
        assert batch["ends"][number] == place
        assert row[place : place + len(tokens)] == tokens.tolist()
        assert positions[place : place + len(tokens)] == list(range(len(tokens)))
        assert not mask[0]
        targets += [(int(tokens[at]), place + at - 1, number) for at in range(1, len(tokens)) if mask[at]]
        place += len(tokens)
    assert len(row) == len(positions) == place == batch["ends"][-1]
    columns = [batch[name].tolist() for name in ("labels", "label_index", "label_sequence")]
    assert list(zip(*columns, strict=True)) == targets
    return len(sequences), len(targets)


def test_a_micro_batch_of_conversations(chats):
    source = chats[0]
    samples = [source.draw(0, number) for number in (5, 0, 17)]
    batch = source.collate(samples)
    assert set(batch) == {"input_ids", "position_ids", "ends", "labels", "label_index", "label_sequence", "counts"}
    assert batch["ends"].dtype == torch.int32
    assert {batch[name].dtype for name in set(batch) - {"ends"}} == {torch.int64}
    assert (batch["input_ids"].shape[0], batch["ends"].shape) == (1, (4,))
    num_sequences, num_targets = check_row(source, samples, batch)
    assert (num_sequences, batch["counts"].tolist()) == (3, [num_targets])
    source.recipe.loss_weighting = "sample"
    assert source.collate(samples)["counts"].tolist() == [3]
    source.recipe.loss_weighting = "token"
    empty = source.collate([])
    assert [list(empty[name].shape) for name in ("input_ids", "ends", "labels", "label_index", "counts")] == [
        [1, 1],
        [1],
        [0],
        [0],
        [1],
    ]
    assert empty["counts"].tolist() == [0]
    longest = source.longest()
    assert longest.length == source.max_length == 256
    assert check_row(source, [longest], source.collate([longest])) == (1, 255)


def test_a_micro_batch_of_pairs(pairs):
    source = pairs[0]
    samples = [source.draw(0, number) for number in (7, 2)]
    assert [sample.length for sample in samples] == [sum(sample.lengths) for sample in samples]
    batch = source.collate(samples)
    num_sequences, _ = check_row(source, samples, batch)
    num_chosen = sum(int(sample.is_trained[: sample.lengths[0]].sum()) for sample in samples)
    assert (num_sequences, batch["counts"].tolist()) == (4, [2, num_chosen])
    assert batch["reference"].tolist() == [0.0] * 4
    source.reference = np.arange(80, dtype=np.float32).reshape(40, 2)
    assert source.collate(samples)["reference"].tolist() == [14, 15, 4, 5]
    source.reference[:] = 0
    empty = source.collate([])
    assert [empty[name].tolist() for name in ("ends", "position_ids", "reference", "counts")] == [
        [0],
        [[0]],
        [],
        [0, 0],
    ]
    assert source.max_length == 512
    assert source.longest().lengths == (256, 256)


def test_long_rows_are_dropped_or_cut_and_counted(make):
    long = {"messages": turns(("user", "a"), ("assistant", "b " * 50), ("user", "c"), ("assistant", "d"))}
    rows = [ONE, long, {"messages": turns(("user", "q" * 80), ("assistant", "b"))}, ONE]
    dropped = make(*rows, max_seq_length=40, vocab_size=259)
    assert [len(dropped), dropped.mask_report.num_dropped, dropped.mask_report.num_cut] == [2, 2, 0]
    assert "2 longer than 40 left out" in str(dropped)
    assert re.search(r"left out: 2, longer than max_seq_length 40 \(.*:2, :3\)", str(dropped.row_reports[0]))
    cut = make(*rows, max_seq_length=40, truncation="cut", vocab_size=259)
    report = cut.mask_report
    assert [len(cut), report.num_dropped, report.num_cut, report.num_untrained, report.num_stopped] == [3, 0, 1, 1, 2]
    assert [cut.draw(0, number).length for number in range(3)] == [
        len(cut.draw(0, 0).tokens),
        40,
        len(cut.draw(0, 0).tokens),
    ]
    assert cut.rows[int(cut.places[2])]["place"].endswith(":4")


WEIGHTLESS = turns(("user", "q"), ("assistant", "no"), ("user", "r"), ("assistant", "ok"))
WEIGHTLESS[1]["weight"] = 0


@pytest.mark.parametrize("template", [None, CHATML, LLAMA3, MISTRAL, PLAIN, MARKERS])
def test_a_turn_of_weight_0_is_not_trained(make, template):
    whole = {"messages": [{**turn, "weight": 1} for turn in WEIGHTLESS]}
    source = make({"messages": WEIGHTLESS}, whole, template=template)
    (text,), (expected,) = marked(source), marked(source, 1)
    before, _, after = expected.partition("[[")
    assert text == before + after.replace("]]", "", 1)
    assert "turns of weight 0, not trained: 1" in str(source.row_reports[0])
    assert marked(make(whole, template=template))[0] == expected
    assert "weight" not in str(make(whole, template=template).row_reports[0])


def test_turns_that_a_template_does_not_keep_apart_cannot_be_left_out(make):
    joined = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    )
    joined += "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    row = {"messages": [*WEIGHTLESS[:2], *turns(("assistant", "ok"))]}
    with pytest.raises(UsageError, match="the template does not keep the turns of the assistant apart"):
        make(row, template=joined)
    last = {"messages": [*WEIGHTLESS[2:], *WEIGHTLESS[:2]]}
    with pytest.raises(UsageError, match="no token of any row is trained"):
        make(last, train_on="completions")


def test_all_faults_are_refused_at_once_or_skipped(make, tmp_path):
    """Of both parts of a file, of rows and of the template, a line for each kind."""
    lost = {"messages": turns(("user", "a"), ("system", "late"), ("assistant", "b"))}
    late = CHATML.replace("m['role'] +", "(raise_exception('late') if m['role'] == 'system' else m['role']) +")
    rows = [ONE] * 10 + [{"messages": []}] * 2 + [lost] * 30 + [ONE] * 10 + [{"id": 1}]
    with pytest.raises(UsageError) as error:
        make(*rows, template=late, validation_fraction=0.5)
    file = tmp_path / "rows.jsonl"
    problems = error.value.problems
    assert problems[0] == (
        f"{file}:11: messages holds an empty list, must be a list of objects with role and content: mend it (2 rows: also :12)"
    )
    assert problems[1].startswith(f"{file}:53: its columns are 'id'")
    assert re.match(
        rf"{file}:\d+: the chat template refuses it \(late\).*\(30 rows: also :\d+, :\d+, ...\)", problems[2]
    )
    assert problems[2].endswith("; --on_bad_row skip leaves out these 33 rows of 53")
    assert len(problems) == 3
    changes = {"train_file": [str(file)], "chat_template": str(tmp_path / "template.jinja"), "validation_fraction": 0.5}
    train, held_out = build(recipe(**changes), None, "skip")
    assert len(train) + len(held_out) == 20
    assert str(train.row_reports[0]).startswith(
        f"train_file: 53 rows read, 20 used, {len(held_out)} of them held out\n"
    )
    assert len(train.row_reports[0].bad) == 33
    with pytest.raises(UsageError, match="must be messages"):
        make({"id": 1}, {"id": 2})


def test_fields_that_the_template_uses_are_not_named(make):
    named = CHATML.replace("m['role'] +", "m['role'] + (m['name'] or '') +")
    row = {"messages": turns(*CHAT[:2]), "id": 3}
    row["messages"][0] |= {"name": "Ann", "time": 3}
    report = str(make(row, ONE, template=named).row_reports[0])
    assert report.endswith("  columns used: messages, messages[].name\n  NOT used: id (1 row), messages[].time (1 row)")
    assert "messages[].name (1 row)" in str(make(row, ONE, template=CHATML).row_reports[0])


def test_what_is_said_of_completions_and_of_plain_texts(make, tmp_path):
    assert (
        "WARNING: train_on completions leaves out 1 of 2 turns of the assistant (50.0 %): --train_on assistant"
        in str(make({"messages": turns(*CHAT)}, train_on="completions").row_reports[0])
    )
    assert "WARNING" not in str(make({"messages": turns(*CHAT[:2])}, train_on="completions").row_reports[0])
    make({"messages": turns(*CHAT)}).tokenizer.save_pretrained(tmp_path / "instruct")
    changes = {"tokenizer_name": str(tmp_path / "instruct"), "vocab_size": None}
    report = str(make({"prompt": "a", "completion": " b"}, **changes).row_reports[0])
    assert "plain text: no template" in report
    assert "plain text" not in str(make({"messages": turns(*CHAT)}, **changes).row_reports[0])


def test_columns_by_other_names(make):
    row = {"chat": turns(*CHAT), "label": False}
    names = {"chat": "messages", "label": "unused"}
    assert marked(make(row, column_names=names)) == marked(make({"messages": turns(*CHAT)}))
    with pytest.raises(
        UsageError, match=r"columns names chatt, which no row that can be read has: did you mean chat\?"
    ):
        make({"messages": turns(*CHAT), "chat": 3}, column_names={"chatt": "unused"})


def test_special_tokens_in_a_text_are_counted(make):
    source = make(ONE, {"messages": turns(("user", "what is <|im_end|>?"), ("assistant", "b"))})
    assert source.mask_report.num_special == 1
    assert "with a special token in their text: 1" in str(source.mask_report)


@pytest.mark.rooms
def test_samples_are_shown(make):
    from samestep.contrib.showing.texts import show_samples

    source = make({"messages": turns(("user", "a\x07"), ("assistant", "b"))})
    text = "\n".join(show_samples(source, 3))
    assert "--- sample 0 (" in text
    assert "user\na\\x07<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>]]\n---" in text
    assert text.endswith(str(source.mask_report))
    assert "\x1b[1;4mb<|im_end|>\x1b[0m" in "\n".join(show_samples(source, 1, colour=True))
    assert source.tokenizer.chat_template == chat_templates.CHAT_TEMPLATE


@pytest.mark.rooms
def test_a_row_of_a_file_is_shown(make):
    """Of the training or of what is held out; a place where no sample comes from is refused."""
    from samestep.contrib.showing.texts import show_row

    rows = [{"messages": turns(("user", f"q{number}"), ("assistant", f"a{number}"))} for number in range(12)]
    source = make(*rows, name="chats.jsonl")
    lines = show_row([source, None], "chats.jsonl:11")
    assert lines[0].startswith("--- sample ")
    assert "[[a10<|im_end|>]]" in lines[-1]
    assert "".join(lines).count("--- sample") == 1
    assert show_row([source, source], "chats.jsonl:11") == 2 * lines
    assert show_row([source], "11") == lines
    (first,) = [line for line in show_row([source], "1") if line.startswith("---")]
    assert first.endswith("chats.jsonl:1)"), "and neither line 11 nor another file's"
    with pytest.raises(UsageError, match=r"row is 's.jsonl:11'"):
        show_row([source], "s.jsonl:11")
    with pytest.raises(UsageError, match=r"row is 'chats.jsonl:99', and no sample comes from there"):
        show_row([source], "chats.jsonl:99")
    with pytest.raises(UsageError, match=r"only chats and texts that are read whole"):
        show_row([SimpleNamespace()], "chats.jsonl:1")


@pytest.mark.rooms
def test_the_command_shows_data(capsys):
    words = "show-data sft_small_cpu --objective dpo --dataset_name builtin/drawn_pairs --train_on completions"
    words += (
        " --num_samples 2 --num_train_samples 40 --num_validation_samples 10 --sft_loss_weight 0.5 --vocab_size 320"
    )
    assert exit_code(lambda: cli.main(words.split())) == 0
    out = capsys.readouterr().out
    assert (out.count("--- sample "), out.count("\nchosen: "), out.count("\nrejected: ")) == (2, 2, 2)
    assert out.count("<|im_end|>]]") == 4
    assert "\ntrained: " in out
    assert out.splitlines()[-1].startswith("held out: 10 pairs of answers (columns prompt, chosen, rejected; ")


def test_two_turns_of_one_role_in_a_row_are_said_and_results_of_tools_are_none(tmp_path):
    user, answer, tool = ({"role": role, "content": role} for role in ("user", "assistant", "tool"))
    chats = [[user, answer], [user, answer, tool, tool, answer], [user, answer, answer], [user, user, answer]]
    notes = {}
    for name, kept in (("all", chats), ("one", chats[:3]), ("none", chats[:2])):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in kept))
        notes[name] = conversation_rows.report_rows(name, conversation_rows.load_rows([str(file)]), [str(file)]).notes
    assert notes["none"] == []
    place = tmp_path / "one.jsonl"
    assert notes["one"] == [f"1 row has two turns of one role in a row: first {place}:3, assistant"]
    place = tmp_path / "all.jsonl"
    assert notes["all"] == [f"2 rows have two turns of one role in a row: first {place}:3, assistant"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "show-data bert_base",
            "show-data bert_base: its task is bert_pretraining, must be causal_lm_finetuning or seq2seq_finetuning. The rows "
            "of this one are read and counted by a rehearsal: python scripts/pretrain_bert.py --recipe bert_base --rehearse",
        ),
        ("show-data --num_samples 2", "it needs a recipe as its first word"),
        ("show-data bert_base --num_samples 0", "num_samples is 0, must be"),
        ("show-data sft_small_cpu --row a.jsonl:3 --html a.html", "row is set, and html is: a page has no single row"),
    ],
)
def test_the_command_refuses(capsys, words, message):
    assert exit_code(lambda: cli.main(words.split())) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
