"""Which tokens are trained with chat templates as models have them: of any shape, with calls, thoughts and the clock."""

import datetime

import pytest
from common import load_benchmark

from samestep.data.chat_templates import Renderer
from samestep.errors import UsageError

templates = load_benchmark("templates")
RELEASED = templates.templates()

END = "{{ '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
THINKS = (  # writes thoughts of turns behind the last question only, as Qwen3's
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}"
    "{% endfor %}" + END + "{% endfor %}" + PROMPT
)
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}" + END + "{% endfor %}" + PROMPT
ENDS = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"  # as Phi-3's
ONLY_EOS = (  # no token ends a turn, one ends all
    "{% for m in messages %}{{ ('<|user|>' if m.role == 'user' else '<|assistant|>') + m.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
MOVES = (  # writes the system turn into the last question, as Mistral's
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.index0 == messages | length - 2 %}"
    "{{ messages[0].content + '\n' }}{% endif %}{{ m.content }} [/INST]{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% endif %}{% endfor %}"
)
INSIDE = (  # writes results of tools into the turn that calls them
    "{% for m in messages %}{% set i = loop.index %}"
    "{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}"
    "{{ '<result>' + (messages[i] | default({'content': ''})).content }}{% endfor %}"
    + END
    + "{% endif %}{% endfor %}"
    + PROMPT
)
IN_MACRO = "{% macro all() %}" + CHATML + "{% endmacro %}{{ all() }}"
REWRITES = IN_MACRO.replace("m.content }}", "(m.content if loop.last else m.content + '!') }}")


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(arguments, **more):
    return answer(
        "", tool_calls=[{"type": "function", "function": {"name": "weather", "arguments": arguments}}], **more
    )


def make(template, train_on="assistant", date=None):
    return Renderer(templates.make_tokenizer(template), train_on, True, date)


def trained(renderer, *turns):
    """Write the trained runs of a conversation as texts."""
    first = len(turns) - 1 if renderer.train_on == "completions" else 0
    row = {"prompt": [*turns[:first]], "answers": [[*turns[first:]]], "tools": None}
    ((tokens, mask),) = renderer.render(row)
    text = "".join(
        f"[[{renderer.tokenizer.decode([token])}]]" if is_trained else "|"
        for token, is_trained in zip(tokens.tolist(), mask, strict=True)
    ).replace("]][[", "")
    return [part.partition("]]")[0] for part in text.split("[[")[1:]]


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_template_trains_the_answers_or_is_refused(name):
    verdicts = templates.measure(RELEASED[name], num_drawn=2)
    assert not [verdict for verdict in verdicts["kinds"].values() if verdict.startswith("WRONG")]
    assert "WRONG" not in verdicts["drawn"]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2", "gptoss"])
def test_templates_of_today_take_several_turns_and_tools(name):
    renderer = make(RELEASED[name])
    for kind in ("several answers", "tools"):
        assert templates.judge(renderer, templates.KINDS[kind]) == "right"


def test_markers_that_begin_before_the_answer_train_what_the_model_writes():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}"
        "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}<|im_start|>{{ m.role + '\n' + m.content }}"
        "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}" + PROMPT
    )
    turns = [user("a"), answer("b"), user("c"), answer("d")]
    for train_on, expected in (("assistant", ["b<|im_end|>", "d<|im_end|>"]), ("completions", ["d<|im_end|>"])):
        assert trained(make(template, train_on), *turns) == expected


def test_thoughts_that_the_whole_leaves_out_are_not_trained():
    renderer = make(THINKS)
    turns = [user("a"), answer("b", reasoning_content="t"), user("c"), call({"x": 1}, reasoning_content="v")]
    turns += [{"role": "tool", "content": "17"}, answer("d", reasoning_content="w")]
    late = [
        '<think>\nv\n</think>\n\n<tool_call>weather{"x": 1}</tool_call><|im_end|>',
        "<think>\nw\n</think>\n\nd<|im_end|>",
    ]
    assert trained(renderer, *turns) == ["b<|im_end|>", *late]
    assert not renderer.is_rewritten
    more = [*turns, user("e"), answer("f")]  # the call was made with thoughts, which the whole no longer has
    expected = ["b<|im_end|>", '<tool_call>weather{"x": 1}</tool_call><|im_end|>', "d<|im_end|>"]
    assert trained(renderer, *more) == [*expected, "<think>\n\n</think>\n\nf<|im_end|>"]
    assert renderer.is_rewritten
    assert trained(make(THINKS, "completions"), *more) == ["<think>\n\n</think>\n\nf<|im_end|>"]


def test_answers_end_with_their_own_stop_token():
    turns = [user("a"), answer("b"), user("c"), answer("d")]
    assert trained(make(ENDS), *turns) == ["b<|im_end|>", "d<|im_end|>"]
    assert trained(make(ONLY_EOS), *turns) == ["b<|user|>", "d</s>"]


def test_turns_may_stand_at_other_places():
    system = {"role": "system", "content": "s"}
    renderer = make(MOVES)
    assert trained(renderer, system, user("a"), answer("b"), user("c"), answer("d")) == ["b</s>", "d</s>"]
    assert renderer.is_rewritten
    turns = [user("a"), call({"x": 1}), {"role": "tool", "content": "17"}, answer("b")]
    with pytest.raises(UsageError, match="otherwise when more turns follow"):
        trained(make(INSIDE), *turns)


def test_the_first_turn_may_be_the_assistants():
    assert trained(make(CHATML), answer("b"), user("c"), answer("d")) == ["b<|im_end|>", "d<|im_end|>"]
    greets = CHATML.replace("{% for m in messages %}", "{% for m in messages %}{% if loop.first %}Be kind.{% endif %}")
    with pytest.raises(UsageError, match="the first turn is the assistant's"):
        trained(make(greets), answer("b"), user("c"), answer("d"))


def test_a_loop_that_cannot_be_followed_is_rendered_by_beginnings():
    turns = [user("a"), answer("b"), user("c"), answer("d")]
    assert trained(make(IN_MACRO), *turns) == ["b<|im_end|>", "d<|im_end|>"]
    with pytest.raises(UsageError, match="renders the beginning, up to turn 1, otherwise when more turns follow"):
        trained(make(REWRITES), *turns)


CALLS = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ARGUMENTS }}{% endfor %}"
AS_JSON = CHATML.replace(
    "m.content }}", "(m.content or '') }}" + CALLS.replace("ARGUMENTS", "(c.function.arguments | tojson)")
)
AS_TEXT = AS_JSON.replace("(c.function.arguments | tojson)", "c.function.arguments")
AS_PYTHON = AS_JSON.replace("(c.function.arguments | tojson)", "(c.function.arguments | string)")
NEEDS_NONE = AS_TEXT.replace("(m.content or '')", "('' if m.content is none else m.content)")


@pytest.mark.parametrize("template", [AS_JSON, AS_TEXT, AS_PYTHON, NEEDS_NONE], ids=["json", "text", "python", "none"])
def test_arguments_as_text_are_the_same_tokens(template):
    turns = {"role": "tool", "content": "17"}, answer("b")
    forms = {"city": "Oslo", "n": [1, None]}, ' {"city":"\\u004fslo",\n"n":[1,null]}'
    texts = [trained(make(template), user("a"), call(form), *turns) for form in forms]
    assert texts[0] == texts[1] == ['<call>weather{"city": "Oslo", "n": [1, null]}<|im_end|>', "b<|im_end|>"]
    assert trained(make(template), user("a"), call(""), *turns)[0] == "<call>weather{}<|im_end|>"


def test_a_text_that_is_no_object_is_refused_where_an_object_is_needed():
    turns = [user("a"), call("print(1)"), {"role": "tool", "content": "17"}, answer("b")]
    assert trained(make(AS_TEXT), *turns)[0] == "<call>weatherprint(1)<|im_end|>"
    renderer = make(AS_JSON)
    rows = [{"prompt": turns[:-1], "answers": [[answer(text)]], "tools": None} for text in "bc"]
    renderer.ask(rows)
    for row in rows:
        with pytest.raises(
            UsageError, match=r"^turn 2 calls the tool 'weather' with arguments .* no JSON object .*: write them"
        ):
            renderer.render(row)


CLOCK = "{{ strftime_now('%d %b %Y %H:%M') + '<|im_end|>' }}" + CHATML


def test_a_template_reads_the_day_on_which_the_run_began():
    renderer = make(CLOCK, "all", "2026-03-01")
    assert trained(renderer, user("a"), answer("b"))[0].startswith("1 Mar 2026 00:00<|im_end|>")
    assert renderer.date == "2026-03-01"
    assert make(CLOCK).date == datetime.date.today().isoformat()
    assert "reads 2026-03-01 from the clock, on any day" in make(CLOCK, date="2026-03-01").rule
    assert make(CHATML, date="2026-03-01").date is None
    assert trained(make(CLOCK, "all", "2025-12-31"), user("a"), answer("b"))[0].startswith("1 Dec 2025 00:00")
