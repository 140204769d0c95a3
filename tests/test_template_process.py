"""Chat templates, programs of others, are rendered within limits of time, memory and output, as transformers renders them."""

import os
import signal

import pytest
from cases import keep
from transformers.utils.chat_template_utils import render_jinja_template

from samestep.data import chat_templates
from samestep.data.template_process import (
    PROCESS,
    Part,
    Request,
    TemplateLimitError,
    TemplateProcess,
    TemplateRefusal,
    Times,
)
from samestep.errors import UsageError
from samestep.recipe import catalog as recipes

TURNS = [
    {"role": "system", "content": "Sé amable \ud800"},
    {"role": "user", "content": "日本語"},
    {"role": "assistant", "content": "yes", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5}}}]},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "no"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TOKENS = {"eos_token": "<|im_end|>", "bos_token": "<s>"}
PARTS = [Part(5), Part(2, begins_answer=True), Part(3)]

SLOW = {  # each takes more time than there is
    "nested": "{% for a in range(9999) %}{% for b in range(9999) %}{{ '' }}{% endfor %}{% endfor %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "power": "{{ (3 ** (10 ** 8)) % 7 }}",
    "powers": "{{ 7 ** (7 ** (8 + messages | length)) }}",
    "product": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "sorted": "{% for i in range(9999) %}{% set x = range(99999) | sort %}{% endfor %}",
}
LARGE = {  # each takes more memory than there is, most of them in one call
    "centred": "{{ 'a'.center(9 * 10 ** 9) }}",
    "filled": "{{ '%09999999999d' % 1 }}",
    "formatted": "{{ '{:>9999999999}'.format(1) }}",
    "filter": "{{ '%9999999999s' | format('a') }}",
    "times": "{{ 'a' * 10 ** 10 }}",
    "list": "{{ [1] * 10 ** 10 }}",
    "doubled": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "replaced": "{{ ('a' * 10 ** 5).replace('a', 'b' * 10 ** 5) }}",
    "joined": "{{ range(99999) | join('x' * 10 ** 5) }}",
    "indented": "{{ ('\n' * 10 ** 5) | indent(10 ** 5, blank=true) }}",
    "tabs": "{{ ('\t' * 10 ** 5).expandtabs(10 ** 5) }}",
    "json": "{{ ([[]] * 10 ** 5) | tojson(indent=10 ** 5) }}",
}
LONG = {
    "long": "{{ 'a' * 5000000 }}",
    "many": "{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}",
}
DEEP = {
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "index": "{{ messages[10 ** 10] }}{{ 1 // 0 }}",
    "not jinja": "{% for",
}


ONE = [Part(1)]


def take(template, parts=ONE, turns=TURNS, tools=None, has_markers=False, process=PROCESS):
    return list(process.take(Request(template, TOKENS, turns, tools, parts, has_markers)))


@pytest.fixture
def short():
    """Give a process with little time, which the limits that are tried would take in any case."""
    process = TemplateProcess(Times(most=0.2))
    yield process
    process.close()


@pytest.mark.parametrize("template", keep(SLOW.values(), [SLOW["macro"], SLOW["power"]]), ids=[*SLOW])
def test_a_template_without_an_end_is_ended(short, template):
    with pytest.raises(
        TemplateLimitError, match=r"^takes more than 0\.2 s of processor time for a conversation: mend it"
    ):
        take(template, process=short)
    assert take("{{ messages | length }}", process=short)[0].text == "1"  # another process goes on


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux limits memory")
@pytest.mark.parametrize("template", [*LARGE.values()], ids=[*LARGE])
def test_a_template_without_measure_gets_no_memory(template):
    limits = r"(768 MiB of memory|1 s of processor time)"  # a slow machine takes that to fill what is allowed
    with pytest.raises(TemplateLimitError, match=rf"^takes more than {limits} for a conversation: mend it"):
        take(template)
    assert take("{{ messages | length }}")[0].text == "1"


@pytest.mark.parametrize("template", [*LONG.values()], ids=[*LONG])
def test_a_text_may_be_long_only_for_a_long_conversation(template):
    with pytest.raises(
        TemplateLimitError, match=r"^makes more than 1,0\d\d,\d\d\d characters of a conversation of \d+ bytes"
    ):
        take(template)
    long_turns = [*TURNS, {"role": "user", "content": "b" * 200_000}]
    assert len(take(template, turns=long_turns)[0].text) >= 5_000_000


@pytest.mark.parametrize("template", [*DEEP.values()], ids=[*DEEP])
def test_other_faults_are_refusals_with_a_reason(template):
    with pytest.raises(TemplateRefusal, match=r"^[^\n]{1,300}$"):
        take(template)


def test_many_slow_renderings_are_refused_by_their_average():
    process = TemplateProcess(Times(most=0.3, average=0.0, per_byte=0.0))
    template = "{% for a in range(9999) %}{% set x = range(99) | list %}{% endfor %}"  # some milliseconds each
    with pytest.raises(TemplateLimitError, match=r"^takes more than 0 s of processor time on average"):
        take(template, [Part(1)] * 100_000, process=process)
    process.close()


@pytest.mark.parametrize("name", chat_templates.TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renderings_are_those_of_transformers(name, tools):
    template = chat_templates.TEMPLATES[name]
    for has_markers in (False, True):
        for part, rendering in zip(PARTS, take(template, PARTS, TURNS, tools, has_markers), strict=True):
            (text,), spans = render_jinja_template(
                conversations=[TURNS[: part.num_turns]],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=has_markers,
                add_generation_prompt=part.begins_answer,
                **TOKENS,
            )
            assert rendering.text == text
            if has_markers:
                assert [tuple(span) for span in rendering.spans] == [span for each in spans for span in each]


def test_what_was_asked_for_is_taken_in_order_or_left():
    """Conversations that a caller leaves half-way, never takes, or takes without having asked, do not mix."""
    template = "{{ messages | map(attribute='content') | join('-') }}"
    requests = [
        Request(
            template,
            TOKENS,
            [{"role": "user", "content": f"{i}"}, {"role": "user", "content": "b"}],
            None,
            [Part(2), Part(1)],
        )
        for i in (0, 1, 1, 2, 3, 4)
    ]
    PROCESS.ask(requests)
    assert [answer.text for answer in PROCESS.take(requests[0])] == ["0-b", "0"]
    assert next(PROCESS.take(requests[1])).text == "1-b"  # and its second part is left
    assert [answer.text for answer in PROCESS.take(requests[2])] == ["1-b", "1"]  # equal to the one before
    assert [answer.text for answer in PROCESS.take(requests[4])] == ["3-b", "3"]  # one between is never taken
    assert [answer.text for answer in PROCESS.take(requests[0])] == ["0-b", "0"]  # asked anew
    assert [answer.text for answer in PROCESS.take(requests[5])] == ["4-b", "4"]
    PROCESS.ask(requests)
    PROCESS.ask(requests[3:])
    assert [answer.text for answer in PROCESS.take(requests[3])] == ["2-b", "2"]


def test_the_conversation_that_ends_the_process_is_found(short):
    template = "{% set n = messages[0]['content'] | int %}{{ n }}{% if n == 3 %}{{ 7 ** (7 ** (3 * n)) }}{% endif %}"
    requests = [Request(template, TOKENS, [{"role": "user", "content": f"{i}"}], None, [Part(1)]) for i in range(6)]
    PROCESS.ask(requests)
    for number, request in enumerate(requests):
        if number == 3:
            with pytest.raises(TemplateLimitError, match="processor time"):
                next(PROCESS.take(request))
        else:
            assert next(PROCESS.take(request)).text == f"{number}"
    PROCESS.ask(requests)
    PROCESS.ask(requests[:1])  # nobody takes what has ended the process
    assert next(PROCESS.take(requests[0])).text == "0"


def test_a_process_that_others_kill_is_started_again():
    assert take("a")[0].text == "a"
    os.kill(PROCESS.pid, signal.SIGKILL)
    with pytest.raises(TemplateLimitError, match="has its process killed"):
        take("a")
    assert take("a")[0].text == "a"
    PROCESS.ask([Request("a", TOKENS, TURNS, None, [Part(1)])])
    assert next(PROCESS.take(Request("a", TOKENS, TURNS, None, [Part(1)]))).text == "a"


def test_a_forked_process_has_a_renderer_of_its_own():
    assert take("{{ eos_token }}")[0].text == "<|im_end|>"
    mine = PROCESS.pid
    if not (pid := os.fork()):
        is_right = take("{{ eos_token }}")[0].text == "<|im_end|>" and PROCESS.pid != mine
        PROCESS.close()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert take("{{ bos_token }}")[0].text == "<s>"
    assert PROCESS.pid == mine


def test_the_process_ends_with_its_pipe():
    take("a")
    pid = PROCESS.pid
    PROCESS.pipes[0].close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    PROCESS.owner = 0
    PROCESS.close()


@pytest.mark.parametrize("name", ["power", "times"])
def test_the_error_names_the_file_before_data_are_read(short, tmp_path, name):
    file = tmp_path / "odd.jinja"
    file.write_text((SLOW | LARGE)[name])
    changes = {"chat_template": str(file), "train_file": [str(tmp_path / "nowhere.jsonl")], "dataset_name": None}
    recipe = recipes.load("sft_small_cpu", changes | {"dataset_config_name": None, "num_train_samples": None})
    with pytest.raises(
        UsageError, match=r"^chat_template .*odd\.jinja takes more than .*: mend it, or give another"
    ) as error:
        chat_templates.try_template(recipe)
    assert "\n" not in str(error.value)
