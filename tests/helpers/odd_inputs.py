"""Odd values for every field that can be set, odd files in every place, and programs of others, and what is done with them.

For tests/test_bounds.py and benchmarks/bounds.py. The fields are read from the classes themselves: a new field is tried without
a word here.
"""

import contextlib
import dataclasses
import datetime
import functools
import io
import json
import math
import os
import resource
import signal
import socket
import sys
import tempfile
import traceback
import typing
from collections.abc import Callable
from pathlib import Path

import datasets
import yaml
from hypothesis import strategies as st

from samestep.cli import main
from samestep.data import (
    chat_templates,
    conversation_rows,
    documents,
    images,
    labelled_texts,
    row_files,
    row_report,
    template_process,
    tokenizer,
)
from samestep.errors import UsageError, exit_code
from samestep.recipe import catalog as recipes
from samestep.recipe import pretrained_shape
from samestep.recipe import run_settings as run
from samestep.training import capacity, checkpoint
from stepplan.base_models import FIELDS
from stepplan.cli.model import ModelSettings
from stepplan.cli.plan import PlanSettings
from stepplan.cli.scale import ScaleSettings
from stepplan.configs import LISTS, RATES, SIZES
from stepplan.hardware import DEVICES, Device

SECONDS, MEMORY = 20, 2 * 2**30
LONGEST = 300  # seconds after which a case hangs

# ---------------------------------------------------------------------------------------------------------------------
# Values


def _nested(levels: int, kind: str) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value] if kind == "list" else {"a": value}
    return value


# fmt: off
NUMBERS = (
    0, 1, -1, 2, 3, 7, 64, 1000, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**11, 10**30, -(10**30),
    10**400, 0.0, -0.0, 0.1, 0.5, 1.0, 1 - 2**-53, 1.5, 1e-320, 1e-9, 1e9, 1e15, 1e300, -1e300, math.nan, math.inf, -math.inf,
)
TEXTS = (
    "", " ", "\t", "\n", "0", "00", "-", "--", "-1", "1e5", "1e400", "1_000", "0x10", "1:30", "nan", "inf", "-inf", "null", "~",
    "yes", "no", "true", "False", "None", "[1", "[1]", "{", "{}", "*a", "&a", "!!python/name:os.system", "%s%n", "../..", "/",
    "/dev/zero", "/dev/null", "/proc/self/mem", ".", "~/x", "a" * 10_000, "9" * 5000, "0." + "9" * 5000, "é", "\u202e",
    "日本語", "\U0001f600", "\x1b[31m", "\ud800", "\udcff", "\0", "a\0b", "a.yaml", "a.json", "hub/name", "random",
    "2024-01-01", "1.5.2",
)
# fmt: on
ODD = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from([None, True, False, [], {}, [[]], [None], [1, "a"], {"a": 1}, {1: 2}, {None: None}, [1] * 2000]),
    st.sampled_from([(20, "list"), (500, "list"), (500, "mapping")]).map(lambda arguments: _nested(*arguments)),
    st.integers(),
    st.floats(),
    *[st.integers(1, 5000), st.floats(0, 1), st.sampled_from([10**6, 10**9, 10**12, 1e-12, 1e-3, 1e12])] * 2,
    st.text(max_size=20),
    st.sampled_from([datetime.date(2031, 5, 6), datetime.datetime(2031, 5, 6, 7, 8), b"bytes", {1, 2}]),
    st.lists(st.dates() | st.none() | st.booleans() | st.floats() | st.text(max_size=3), min_size=1, max_size=3),
    st.recursive(st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)
INTEGERS = st.one_of(
    st.sampled_from([number for number in NUMBERS if isinstance(number, int)]), st.integers(1, 5000), st.integers()
)
FLOATS = st.one_of(st.sampled_from(NUMBERS), st.floats(0, 1), st.floats())


def odd(hint: object = None) -> st.SearchStrategy:
    """Draw values for a field of a type, half of them of that type, so that allowed values are tried as well."""
    kinds = [ODD]
    if int in (hint, *typing.get_args(hint)):
        kinds.append(INTEGERS)
    elif float in (hint, *typing.get_args(hint)):
        kinds.append(FLOATS)
    elif bool in (hint, *typing.get_args(hint)):
        kinds.append(st.booleans())
    elif hint is not None and "tuple[int" in str(hint):
        kinds.append(st.lists(INTEGERS, max_size=5))
    return st.one_of(*kinds)


# ---------------------------------------------------------------------------------------------------------------------
# Cases: a program, its words, and files for the folder in which it runs


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a program.

    Attributes:
        kind: which kind of field is odd in it.
        task: of the script whose flags are read; None: `python -m recipes`.
        words: its arguments.
        files: name -> content of the folder that it runs in; a text names one of `PLACES`, which is put there.
        call: what is called instead of a program.
        most_memory, most_seconds: bytes and seconds that its kind may take, whatever it does.
    """

    kind: str
    task: str | None
    words: tuple[str, ...]
    files: tuple[tuple[str, bytes | str], ...] = ()
    call: Callable[[], object] | None = None
    most_memory: typing.ClassVar[int] = MEMORY
    most_seconds: typing.ClassVar[float] = LONGEST

    def main(self) -> int | None:
        if self.call is not None:
            self.call()
            return None
        if self.task is None:
            return main()
        run.parse(sys.argv[1:], self.task, "")
        return None


def _words(value: object) -> list[str]:
    """Write a value as a shell passes it: no word can hold a NUL."""
    values = value if isinstance(value, list) and len(value) != 1 else [value]
    return [(item if isinstance(item, str) else _text(item)).replace("\0", "") for item in values]


def _text(value: object) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):  # more digits than Python writes
        return "9" * 5000


def _yaml(values: object) -> bytes:
    """Write with `yaml.safe_dump`, or as JSON, which is YAML too, where that fails."""
    try:
        return yaml.safe_dump(values, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, ValueError, RecursionError):
        return _json(values)


def _json(values: object) -> bytes:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(10_000)
    try:
        return json.dumps(values, default=str, skipkeys=True).encode("utf-8", "surrogatepass")
    finally:
        sys.set_int_max_str_digits(limit)
        sys.setrecursionlimit(1000)


def _fields(*classes: type) -> dict[str, object]:
    """Map names of fields to types."""
    return {name: hint for cls in classes for name, hint in sorted(typing.get_type_hints(cls).items())}


def _single_field(fields: dict[str, object]) -> st.SearchStrategy:
    """Draw a field and a value."""
    return st.sampled_from(sorted(fields)).flatmap(lambda name: st.tuples(st.just(name), odd(fields[name])))


def _changes(fields: dict[str, object]) -> st.SearchStrategy:
    """Draw one or two fields with values."""
    return st.lists(_single_field(fields), min_size=1, max_size=2).map(dict)


RECIPES = {
    task: next(name for name in recipes.catalog_names() if recipes.load(name).task == task) for task in recipes.TASKS
}
BASES = {task: yaml.safe_load(recipes.load(name).to_yaml()) for task, name in RECIPES.items()}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
}
LLAMA = BERT | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
RESNET = {
    "model_type": "resnet",
    "architectures": ["ResNetForImageClassification"],
    "num_channels": 3,
    "embedding_size": 64,
    "hidden_sizes": [64, 128],
    "depths": [2, 2],
    "layer_type": "basic",
    "hidden_act": "relu",
    "id2label": {"0": "a", "1": "b"},
    "downsample_in_first_stage": False,
}
MODELS = (BERT, BERT | {"architectures": ["BertForSequenceClassification"]}, GPT2, LLAMA, RESNET)
CONFIG_FIELDS = dict.fromkeys([*(field for model in MODELS for field in model), "unknown"])
CONFIG_FIELDS |= (
    dict.fromkeys([*SIZES, *FIELDS], int) | dict.fromkeys(RATES, float) | dict.fromkeys(LISTS, tuple[int, ...])
)
DEVICE = yaml.safe_load((DEVICES / "t4.yaml").read_text(encoding="utf-8"))
GPUS = "2x4xt4"

TASKS = st.sampled_from(sorted(recipes.TASKS))


@st.composite
def recipe_flags(draw) -> Case:
    """Draw a flag: a field of a recipe, or of the command."""
    name, task = draw(st.sampled_from(["plan", "scale"])), draw(TASKS)
    settings = PlanSettings if name == "plan" else ScaleSettings
    field, value = draw(_single_field(_fields(recipes.TASKS[task], settings)))
    words = [name, RECIPES[task], "--on", GPUS if name == "plan" else "t4", f"--{field}", *_words(value)]
    return Case("recipe, by flag", None, tuple(words))


@st.composite
def run_flags(draw) -> Case:
    """Draw a flag of a script: a setting of a run, or a field of its recipe."""
    task = draw(TASKS)
    fields = _fields(recipes.TASKS[task].parts.find("settings"))
    del fields["recipe"]
    field, value = draw(_single_field(fields))
    words = ["--recipe", RECIPES[task], f"--{field}", *_words(value)]
    return Case("run settings", task, tuple(words))


@st.composite
def recipe_files(draw) -> Case:
    """Draw one or two fields of a recipe's file."""
    task = draw(TASKS)
    changes = draw(_changes(_fields(recipes.TASKS[task]) | dict.fromkeys(("extends", "unknown", "task"))))
    file = ("odd.yaml", _yaml(BASES[task] | changes))
    words = draw(
        st.sampled_from([("plan", "odd.yaml", "--on", GPUS), ("scale", "odd.yaml", "--on", "t4"), ("plan", "odd.yaml")])
    )
    return Case("recipe, in a file", None, words, (file,))


@st.composite
def device_files(draw) -> Case:
    changes = draw(_changes(_fields(Device) | {"unknown": None}))
    words = draw(
        st.sampled_from([("plan", "bert_base", "--on", "4xodd.yaml"), ("scale", "gpt2_124m", "--on", "odd.yaml")])
    )
    return Case("device file", None, words, (("odd.yaml", _yaml(DEVICE | changes)),))


@st.composite
def model_configurations(draw) -> Case:
    model = draw(st.sampled_from(MODELS))
    changes = draw(_changes(CONFIG_FIELDS))
    file = ("config.json", _json(model | changes))
    words = ["plan", "--model_name_or_path", ".", "--global_batch_size", "64", "--on", GPUS]
    words += [] if model is RESNET else ["--seq_len", "128"]
    return Case("model configuration", None, tuple(words), (file,))


@st.composite
def model_flags(draw) -> Case:
    """Draw a field of the settings for a model without a recipe."""
    name = draw(st.sampled_from(["plan", "scale"]))
    settings = PlanSettings if name == "plan" else ScaleSettings
    field, value = draw(_single_field(_fields(ModelSettings, settings)))
    words = [name, "--model_name_or_path", ".", "--global_batch_size", "64", "--seq_len", "128", "--on", "t4"]
    words += [f"--{field}", *_words(value)]
    return Case("model, by flag", None, tuple(words), (("config.json", _json(BERT)),))


@st.composite
def hostile_texts(draw) -> Case:
    """Draw a file that is no recipe, device or configuration at all."""
    content = draw(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode), st.sampled_from(HOSTILE)))
    words = draw(
        st.sampled_from(
            [
                ("plan", "odd.yaml", "--on", GPUS),
                ("plan", "bert_base", "--on", "1xodd.yaml"),
                ("plan", "--model_name_or_path", "odd.json", "--global_batch_size", "8", "--seq_len", "8"),
            ]
        )
    )
    return Case("any text", None, words, (("odd.json" if "odd.json" in words else "odd.yaml", content),))


HOSTILE = [
    b"a: &a [1, 1, 1]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 12)),
    b"a: &a\n  b: *a\n",
    b"[" * 5000,
    b"{" * 5000,
    b"- " * 5000,
    b"a: " * 5000,
    b'{"a": ' * 5000,
    b"? " * 300,
    b"!!python/object/apply:os.system [id]",
    b"a: !!binary x\n",
    b"a: !!timestamp 2024-99-99\n",
    b"a: 2024-02-31\n",
    b"a: " + b"9" * 5000,
    b"a: 1:" + b"59:" * 400 + b"1",
    b"\xff\xfe\x00",
    b"\0" * 100,
    b"a: \0\n",
    b"\xef\xbb\xbftask: x\n",
    b"task: bert_pretraining\n" * 2,
    b"%YAML 9.9\n---\na: 1\n",
    b"a: 1\n---\nb: 2\n",
    b"<<: {a: 1}\n<<: [1]\n",
    b"<<: 1\n",
    b"? [1, 2]\n: 3\n",
    b"1: 2\nnull: 3\n",
    b'{"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": ' + b"9" * 5000 + b"}",
    b'{"model_type": ["bert"], "architectures": [["BertForMaskedLM"]]}',
    b'{"model_type": "bert", "architectures": {"a": 1}}',
    b'{"model_type": null}',
    b"NaN",
    b"",
    b"#" * 70_000,
    b"a: [" + b"1," * 40_000 + b"1]",
    "".join(f"f{i}: {i}\n" for i in range(6000)).encode(),
]


# ---------------------------------------------------------------------------------------------------------------------
# Files in every place


def _put_endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)  # zeros, which take no place


def _put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


PLACES: dict[str, Callable[[Path], object]] = {
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: path.symlink_to("/dev/null"),
    "random": lambda path: path.symlink_to("/dev/urandom"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "pipe": os.mkfifo,
    "socket": _put_socket,
    "folder": Path.mkdir,
    "itself": lambda path: path.symlink_to(path.name),
    "nowhere": lambda path: path.symlink_to("nothing/there"),
    "below a file": lambda path: path.symlink_to("/etc/passwd/x"),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "endless": _put_endless,
}
"""Kind of what is no small text -> function that puts it at a path."""


def _read_tokenizer() -> None:
    tokenizer.load_tokenizer("model", 1000, ("eos_token",), "GPT-2")


def _read_template() -> None:
    chat_templates.try_template(recipes.load("sft_small_cpu", {"chat_template": "odd.jinja"}))


def _read_checkpoint() -> None:
    checkpoint._read_recipe(Path())
    try:
        checkpoint.verify(Path())
    except checkpoint.DamagedCheckpoint as error:
        raise UsageError(str(error)) from None


def _read_capacity() -> None:
    capacity.FILE = Path("odd.json")  # of this process, which ends with the case
    entries = capacity._read_all()
    for values in entries.values():
        capacity.Capacity("key", **values).note(1, True)


def _read_results() -> None:
    for mark, fault, notes in images._load_results(Path("odd.json")).values():
        assert fault is None or isinstance(fault, str)
        assert all(isinstance(text, str) for text in (mark, *notes))


def _in_own_cache(read: Callable[[], object]) -> Callable[[], None]:
    @functools.wraps(read)
    def call() -> None:
        datasets.config.HF_DATASETS_CACHE = Path("cache").absolute()
        datasets.disable_progress_bars()
        read()

    return call


def _read_documents(file: str) -> None:
    len(row_report.take_good([documents.load_rows(train_file=[file], dataset_name=None)])[0])


def _read_texts(file: str) -> None:
    len(row_report.take_good([labelled_texts.load_rows(train_file=[file])])[0])


def _read_rows(file: str) -> None:
    len(conversation_rows.load_rows([file], train_on="all").rows)


def _read_images() -> None:
    recipe = recipes.load("digits_resnet_cpu", {"train_dir": "pictures", "dataset_name": None})
    images.build(recipe)


READERS: dict[str, tuple[str, tuple[str, ...] | Callable[[], object]]] = {
    "recipe": ("odd.yaml", ("plan", "odd.yaml", "--on", GPUS)),
    "base of a recipe": ("base.yaml", ("plan", "odd.yaml", "--on", GPUS)),
    "device": ("odd.yaml", ("plan", "bert_base", "--on", "1xodd.yaml")),
    "base of a device": ("base.yaml", ("plan", "bert_base", "--on", "1xodd.yaml")),
    "prices": ("odd.yaml", ("plan", "bert_base", "--on", GPUS, "--price_per_hour", "odd.yaml")),
    "launch file to write": ("odd.yaml", ("plan", "bert_base", "--on", GPUS, "--write_config", "odd.yaml")),
    "page to write": ("odd.html", ("plan", "bert_base", "--on", GPUS, "--html", "odd.html")),
    "model": ("config.json", ("plan", "--model_name_or_path", ".", "--global_batch_size", "8", "--seq_len", "8")),
    "tokenizer": ("model/tokenizer.json", _read_tokenizer),
    "tokenizer's configuration": ("model/tokenizer_config.json", _read_tokenizer),
    "vocabulary": ("model/vocab.txt", _read_tokenizer),
    "template of a tokenizer": ("model/chat_template.jinja", _read_tokenizer),
    "chat template": ("odd.jinja", _read_template),
    "recipe of a checkpoint": ("recipe.yaml", _read_checkpoint),
    "manifest": ("manifest.json", _read_checkpoint),
    "capacity": ("odd.json", _read_capacity),
    "verified images": ("odd.json", _read_results),
    **{
        f"documents {kind}": (f"odd{kind}", functools.partial(_read_documents, f"odd{kind}"))
        for kind in row_files.READERS
    },
    **{f"texts {kind}": (f"odd{kind}", functools.partial(_read_texts, f"odd{kind}")) for kind in row_files.ROW_READERS},
    **{f"rows {kind}": (f"odd{kind}", functools.partial(_read_rows, f"odd{kind}")) for kind in row_files.ROW_READERS},
}
"""What is read -> the file's name, and the words of a program, or a function."""


def _case(kind: str, reader: str, content: bytes | str) -> Case:
    name, how = READERS[reader]
    others: tuple[tuple[str, bytes | str], ...] = ()
    if name == "base.yaml":
        others = (("odd.yaml", b"extends: base.yaml\n"),)
    elif name == "manifest.json":
        others = (("recipe.yaml", b"seed: 1\n"),)
    files = ((name, content), *others)
    if isinstance(how, tuple):
        return Case(kind, None, how, files)
    return Case(kind, None, (reader,), files, _in_own_cache(how))


@st.composite
def odd_places(draw) -> Case:
    """Draw what is no small text, in a place where one is read."""
    return _case("file that is none", draw(st.sampled_from(sorted(READERS))), draw(st.sampled_from(sorted(PLACES))))


@st.composite
def odd_contents(draw) -> Case:
    """Draw a content for a file: a text of anything, or lines of JSON with the keys that are looked for, and odd values."""
    reader = draw(st.sampled_from(sorted(READERS)))
    keys = st.sampled_from(
        "text label messages prompt completion chosen rejected tools role content fits way at_once files step".split()
    )
    value = st.one_of(ODD, st.lists(st.dictionaries(st.sampled_from(["role", "content"]), ODD, max_size=2), max_size=2))
    mapping = st.dictionaries(keys, value, max_size=3)
    lines = st.lists(mapping.map(_json), min_size=1, max_size=3).map(b"\n".join)
    hostile = st.sampled_from(
        [*HOSTILE, b"a" * 2**22, b'"' * 2**20, b"text\n" + b"," * 2**20, b'{"text": "' + b"a" * 2**21]
    )
    content = draw(st.one_of(lines, mapping.map(_json), hostile, st.binary(max_size=200)))
    return _case("content of a file", reader, content)


@st.composite
def bare_device_files(draw) -> Case:
    """Draw a device's file with some of the fields, one or two of them odd."""
    kept = draw(st.sets(st.sampled_from(sorted(DEVICE))))
    least = {name: DEVICE[name] for name in ("memory_mib", "memory_gb_per_s", "fp16_tflops")}
    changes = draw(_changes(_fields(Device) | {"extends": None}))
    huge = draw(
        st.sampled_from([{}, {}, {}, {"fp16_tflops": 10**400}, {"bf16_tflops": -(10**400)}, {"memory_mib": 10**400}])
    )
    values = least | {name: DEVICE[name] for name in kept} | changes | huge
    if draw(st.booleans()):
        values = {"extends": "t4"} | changes | huge
    words = draw(
        st.sampled_from([("plan", "bert_base", "--on", "2xodd.yaml"), ("scale", "gpt2_124m", "--on", "odd.yaml")])
    )
    return Case("device file, with few fields", None, words, (("odd.yaml", _yaml(values)),))


def _start_from(task: str) -> None:
    pretrained_shape.load(RECIPES[task], {"model_name_or_path": "."})


@st.composite
def start_configurations(draw) -> Case:
    """Draw the configuration of a model from which a training starts."""
    task = draw(st.sampled_from([task for task in sorted(RECIPES) if "model_name_or_path" in BASES[task]]))
    values = draw(st.sampled_from(MODELS)) | draw(
        _changes(CONFIG_FIELDS | dict.fromkeys(("model_type", "torch_dtype")))
    )
    return Case(
        "model to start from", None, (task,), (("config.json", _json(values)),), functools.partial(_start_from, task)
    )


@st.composite
def price_files(draw) -> Case:
    names = st.sampled_from(["t4", "T4", "nvidia t4", "a100-80", "nowhere", ""])
    values = draw(st.dictionaries(names, odd(float), min_size=1, max_size=3))
    words = ("plan", "bert_base", "--on", GPUS, "--price_per_hour", "odd.yaml")
    return Case("prices", None, words, (("odd.yaml", _yaml(values)),))


# ---------------------------------------------------------------------------------------------------------------------
# Programs of others

SIZES_OF_TEMPLATES = st.sampled_from([0, 1, 7, 10**3, 10**5, 10**6, 10**8, 10**9, 10**11, -1])
VALUES = st.one_of(
    SIZES_OF_TEMPLATES.map(str),
    st.sampled_from(
        ["'a'", "'%s'", "'\\n\\t'", "''", "messages", "messages[0]", "messages[0]['content']", "x", "[[], 1]"]
    ),
    st.sampled_from(
        ["range(99999)", "none", "1.5", "true", "namespace(x='ab')", "{}", "bos_token", "undefined", "joiner('a')"]
    ),
)
FILTERS = """center indent string length list sort join replace('a','b'*N) tojson(indent=N) format(N) batch(N) slice(N) int
    float wordwrap(1) truncate(N) sum(start=N) unique map('string') reverse trim upper title urlize striptags round(N) abs
    random first pprint xmlattr dictsort groupby('x') filesizeformat default('a'*N) center(N) indent(N,true)""".split()


@st.composite
def expressions(draw, depth: int = 3) -> str:
    """Draw an expression of Jinja, with numbers of any size."""
    if not depth or draw(st.integers(0, 4)) == 0:
        return draw(VALUES)
    inner = expressions(depth - 1)
    one, other, size = draw(inner), draw(inner), draw(SIZES_OF_TEMPLATES)
    name = draw(st.sampled_from(FILTERS)).replace("N", str(size))
    methods = [
        "center",
        "ljust",
        "zfill",
        "expandtabs",
        "format",
        "join",
        "split",
        "replace",
        "encode",
        "to_bytes",
        "upper",
    ]
    return draw(
        st.sampled_from(
            [
                *(f"({one} {sign} {other})" for sign in ("*", "**", "%", "+", "~", "//", "/", "-", "in", "<", "and")),
                *(f"({one} | {name})",) * 4,
                *(f"({one}).{draw(st.sampled_from(methods))}({other})",) * 2,
                f"({one})[{other}]",
                f"({one})[::{size}]",
                f"range({one})",
                f"lipsum(n={size})",
                f"('{draw(st.sampled_from(['%0', '%-', '%.', '%']))}{size}{draw(st.sampled_from('dsfxe'))}' % {one})",
                f"('{{:>{size}}}{{:.{size}f}}').format({one}, {other})",
            ]
        )
    )


@st.composite
def statements(draw, depth: int = 3) -> str:
    """Draw a program of Jinja."""
    inner = statements(depth - 1) if depth else expressions().map(lambda text: f"{{{{ {text} }}}}")
    one, other, value = draw(inner), draw(inner), draw(expressions(2))
    return draw(
        st.sampled_from(
            [
                f"{{{{ {value} }}}}",
                f"{{% for x in {value} %}}{one}{{% endfor %}}",
                f"{{% for x in range(99999) %}}{one}{{% endfor %}}",
                f"{{% for message in messages %}}{{{{ message['content'] }}}}{one}{{% endfor %}}",
                f"{{% set n = namespace(x='ab') %}}{{% for i in range(9999) %}}{{% set n.x = n.x ~ n.x %}}{{% endfor %}}{one}",
                f"{{% set n = namespace(x=7) %}}{{% for i in range(9999) %}}{{% set n.x = n.x * n.x %}}{{% endfor %}}{one}",
                f"{{% macro m(x) %}}{one}{{{{ m(x) }}}}{{{{ m(x) }}}}{{% endmacro %}}{{{{ m(1) }}}}",
                f"{{% if {value} %}}{one}{{% else %}}{other}{{% endif %}}",
                f"{{% generation %}}{one}{{% endgeneration %}}{other}",
                f"{{% for x in {value} recursive %}}{{{{ loop([1, 2]) }}}}{{% endfor %}}",
                f"{{% filter center(99999999) %}}{one}{{% endfilter %}}",
                f"{one}{other}",
                f"{{{{ raise_exception({value}) }}}}",
                f"{{{{ strftime_now({value}) }}}}",
                "{{ " + "(" * 3000 + value + ")" * 3000 + " }}",
                "{% if 1 %}" * 300 + one + "{% endif %}" * 300,
                f"{{% {value} %}}",
            ]
        )
    )


def _render(template: str) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 1000}]
    parts = [template_process.Part(2), template_process.Part(1, begins_answer=True)]
    for has_markers in (False, True):
        request = template_process.Request(template, {"bos_token": "<s>"}, turns, None, parts, has_markers)
        try:
            for rendering in template_process.PROCESS.take(request):
                assert len(rendering.text) < 2**21
        except template_process.TemplateRefusal as error:
            raise UsageError(f"refused: {error}") from None
        finally:
            template_process.PROCESS.close()


@st.composite
def programs(draw) -> Case:
    template = draw(statements())
    return Case("chat template", None, (template,), (), functools.partial(_render, template))


# ---------------------------------------------------------------------------------------------------------------------
# Caches


def _fill_cache(folder: str, limit: int | None) -> None:
    os.environ["HF_DATASETS_CACHE"] = folder
    datasets.config.HF_DATASETS_CACHE = folder
    datasets.disable_progress_bars()
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    Path("odd.txt").write_text("one line of text\n\n" * (3 if limit else 2000))
    try:
        table = documents.load_rows(train_file=["odd.txt"], dataset_name=None)
        tokenizer.train_characters(table.rows, 50)
    finally:
        sys.stderr.flush()


@st.composite
def caches(draw) -> Case:
    """Draw a folder into which nobody can write, or a size that files may have."""
    folders = [
        "file/x",
        "/proc/x",
        "/dev/null/x",
        "/sys/x",
        "itself",
        "nowhere",
        "pipe",
        "x" * 300,
        "/dev/full/y",
        "cache",
    ]
    folder = draw(st.sampled_from(folders))
    limit = draw(st.sampled_from([None, 1000, 2000, 4000])) if folder == "cache" else None
    files = (("file", b""), ("itself", "itself"), ("nowhere", "below a file"), ("pipe", "pipe"))
    return Case("cache", None, (folder, str(limit)), files, functools.partial(_fill_cache, folder, limit))


CASES = st.one_of(
    recipe_flags(), run_flags(), recipe_files(), device_files(), model_configurations(), model_flags(), hostile_texts()
)
BOUNDED = st.one_of(
    odd_places(),
    odd_contents(),
    bare_device_files(),
    start_configurations(),
    price_files(),
    programs(),
    programs(),
    caches(),
)
"""Cases of what others wrote: files in every place, programs, caches."""


# ---------------------------------------------------------------------------------------------------------------------
# What is done with them


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a program did with a case.

    Attributes:
        code: exit code; below 0 the signal that ended it (14: it took too long).
        seconds: of a processor, which other programs do not add to.
        memory: bytes that it took beyond what it began with.
        errors: what it wrote to stderr.
        most_memory, most_seconds: bytes and seconds that its kind may take.
    """

    code: int
    seconds: float
    memory: int
    errors: str
    most_memory: int = MEMORY
    most_seconds: float = LONGEST

    @property
    def problem(self) -> str:
        """Say what is wrong with the answer; empty if it is as it must be."""
        lines = self.errors.splitlines()
        if self.code not in (0, 2):
            return f"ended with {self.code}"
        if self.code == 2 and not (lines and lines[0].startswith("ERROR: ")):
            return "refused without a line that says why"
        if self.code == 2 and not all(line.startswith("ERROR: ") for line in lines):
            return "more than one line for a problem"
        if any(len(line) > 1000 or not line.isprintable() for line in lines if self.code == 2):
            return "a line that is too long, or cannot be printed"
        if self.code == 2 and self.seconds > SECONDS:
            return f"{self.seconds:.1f} s until it was refused"
        if self.seconds > self.most_seconds:
            return f"{self.seconds:.1f} s until it ended"
        return f"{self.memory / 2**30:.1f} GiB" if self.memory > self.most_memory else ""


def answer(case: Case) -> Answer:
    """Run a case in a process of its own, forked from this one, which has imported all."""
    with tempfile.TemporaryDirectory(prefix="odd-") as folder:
        for name, content in case.files:
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                PLACES[content](path)
        errors = Path(folder) / "stderr"
        _, least = _forked(lambda: None)
        status, usage = _forked(lambda: _child(case.main, case.words, folder, errors))
        text = errors.read_text(errors="replace") if errors.exists() else ""
        seconds, memory = usage.ru_utime + usage.ru_stime, 1024 * (usage.ru_maxrss - least.ru_maxrss)
        code = os.waitstatus_to_exitcode(status)
        return Answer(code, seconds, memory, text, case.most_memory, case.most_seconds)


def _forked(run: Callable[[], None]) -> tuple[int, resource.struct_rusage]:
    """Run in a forked process; return its status, as `os.wait` gives it, and what it used.

    A forked process begins with less than this one has: pages of files are mapped when they are read.
    """
    pid = os.fork()
    if not pid:
        run()
        os._exit(0)
    _, status, usage = os.wait4(pid, 0)
    return status, usage


def _address_space() -> int:
    """Read the bytes of this process's address space now."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _child(main: Callable[[], int | None], words: tuple[str, ...], folder: str, errors: Path) -> None:
    code = 70
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LONGEST)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + 2 * MEMORY, resource.RLIM_INFINITY))
        os.chdir(folder)
        sys.argv = ["recipes", *words]
        with errors.open("w", errors="backslashreplace") as file:
            sys.stderr, sys.stdout = file, io.StringIO()
            try:
                code = exit_code(main)
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc(file=file)
                code = 70
    finally:
        with contextlib.suppress(Exception):
            os._exit(code)
        os._exit(71)
