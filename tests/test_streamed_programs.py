"""The programs on a stream: the same steps in any cut, on any processes, after moves and kills, over rows that are bad."""

import json
import os
import re
import signal
from collections import Counter

import chat_bases
import pytest
import torch
from cases import keep
from common import DROPOUT, model_of
from compare import check, parameters, relative, untimed_metrics
from forks import call_in_fork
from hooks import StepCount

from samestep.data import seq2seq
from samestep.data.arrow import Dataset
from samestep.data.tokenizer import train_wordpiece
from samestep.recipe.catalog import load

STREAM = " --streaming --num_streams 6 --shuffle_buffer_size 8"
CHAT = (  # GPT-2 normalises in float64: Llama's float32 rounds what three processes multiply by 3
    " --dataset_name none --num_train_samples none --num_validation_samples none --num_generations 0 --architecture gpt2 "
    "--num_key_value_heads none"
)
LABELS = f"{DROPOUT} --train_file DATA/labels --tokenizer_name DATA/bert"
# Name -> program, and flags beside its tiny model's; DATA is the folder of the shards.
WORKLOADS = {
    "blocks": ("pretrain_gpt2", " --resid_pdrop 0.1 --train_file DATA/texts --validation_file DATA/texts/0.jsonl"),
    "documents": ("pretrain_gpt2", " --packing false --train_file DATA/texts --validation_file DATA/texts/0.jsonl"),
    "chats": ("finetune_causal_lm", f"{CHAT} --train_file DATA/chats --validation_file DATA/chats/0.jsonl"),
    "mixture": (
        "finetune_causal_lm",
        f"{CHAT} --train_file DATA/chats DATA/alpaca.jsonl --mixture_weights 0.75 0.25 "
        "--validation_file DATA/chats/0.jsonl",
    ),
    "preferences": (
        "finetune_causal_lm",
        f"{CHAT} --train_file DATA/pairs.jsonl --validation_file DATA/pairs.jsonl --objective orpo --train_on completions",
    ),
    "bert": (
        "pretrain_bert",
        f"{DROPOUT} --train_file DATA/texts --validation_file DATA/texts/0.jsonl --tokenizer_name DATA/bert",
    ),
    "labels": ("finetune_classifier", f"{LABELS} --validation_file DATA/labels/0.jsonl"),
    "numbers": ("finetune_classifier", f"{LABELS} --label_column number --validation_file DATA/labels/0.jsonl"),
    "sources": (
        "finetune_seq2seq",
        " --train_file DATA/sources --validation_file DATA/sources/0.jsonl --tokenizer_name DATA/t5 --vocab_size 300 "
        "--dataset_name none --num_train_samples none --num_validation_samples none --num_generations 0 "
        "--max_source_length 24 --max_target_length 16 --architecture bart --max_position_embeddings 24",  # as above
    ),
    "embeddings": (
        "train_embeddings",
        " --train_file DATA/queries --validation_file DATA/queries/0.jsonl --tokenizer_name DATA/bert --vocab_size 300 "
        "--dataset_name none --num_negatives 1",
    ),
}


@pytest.fixture(scope="session")
def data(corpus, tmp_path_factory):
    """Write shards of all kinds, and the tokenizer that all models have."""
    folder = tmp_path_factory.mktemp("shards")
    chat_bases.make_tokenizer().save_pretrained(folder / "tokenizer")
    texts = corpus.read_text().splitlines(keepends=True)
    chats = chat_bases.write_chats(folder / "all.jsonl", 60).read_text().splitlines(keepends=True)
    for name, lines in (("texts", texts), ("chats", chats)):
        (folder / name).mkdir()
        for number in range(7):
            (folder / name / f"{number}.jsonl").write_text("".join(lines[number::7]))
    words = [re.findall(r"[A-Za-z]+", json.loads(line)["text"]) for line in texts]
    train_wordpiece(Dataset.from_list([{"text": " ".join(text)} for text in words]), 300, True).save_pretrained(
        folder / "bert"
    )
    labels, sources, queries = [], [], []
    for row, text in enumerate(words):
        some, more = " ".join(text[: 2 + row % 17]), " ".join(text[3 : 5 + row % 5])
        labels.append({"text": some, "label": "abc"[row % 3], "number": row / 8 + 0.3})
        sources.append({"source": some, "target": more})
        queries.append({"query": some, "positive": more, "negative": " ".join(text[9:12]) if row % 4 else None})
    for name, rows in (("labels", labels), ("sources", sources), ("queries", queries)):
        (folder / name).mkdir()
        for number in range(7):
            (folder / name / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[number::7]))
    changes = {"train_file": [str(folder / "sources" / "0.jsonl")], "dataset_name": None, "vocab_size": 300}
    changes |= {"num_train_samples": None, "num_validation_samples": None, "tokenizer": "byte_level_bpe"}
    seq2seq.build(load("seq2seq_small_cpu", changes))[0].tokenizer.save_pretrained(folder / "t5")
    questions = [f"Say {number}." for number in range(30)]
    rows = [{"instruction": text, "output": "yes " * (len(text) % 4 + 1)} for text in questions]
    pairs = [
        {"prompt": text, "chosen": "aa " * (place % 4 + 1), "rejected": "b"} for place, text in enumerate(questions)
    ]
    for name, part in (("alpaca", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def flags(data, workload, cap, batch=10, more=""):
    """Write flags that train a workload in float64, seven steps, into the second epoch of its streams."""
    cut = f"--global_batch_size {batch} --per_device_train_batch_size {cap} --dtype float64 --max_train_steps 7"
    own = f" --tokenizer_name DATA/tokenizer{STREAM}{WORKLOADS[workload][1]}"
    return f"{cut}{own.replace('DATA', str(data))}{more}"


@pytest.fixture(scope="module")
def references():
    """Of this file's tests: workload -> output folder."""
    return {}


@pytest.fixture
def reference(train, references, data, tmp_path_factory):
    """Train a workload on whole batches, once for all tests: reference("blocks")."""

    def run(workload):
        if workload not in references:
            folder = tmp_path_factory.mktemp("reference") / workload
            program = WORKLOADS[workload][0]
            references[workload] = train("", flags(data, workload, 10), output_dir=folder, program=program)
        return references[workload]

    return run


@pytest.fixture
def train_stream(train, data):
    """Train a workload: train_stream("blocks", "name", cap, "--flag value ...") -> output folder."""

    def run(workload, name, cap, more=""):
        return train(name, flags(data, workload, cap, more=more), program=WORKLOADS[workload][0])

    return run


# ---------------------------------------------------------------------------------------------------------------------
# cuts


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_cut_in_time_is_the_same_step(train_stream, reference, workload):
    whole = reference(workload)
    for cap in (3,) if workload != "blocks" else (1, 3, 4):
        check(train_stream(workload, f"cap{cap}", cap), whole, "float64")


@pytest.mark.distributed
@pytest.mark.parametrize("num_processes", keep([2, 3], [3]))
def test_every_cut_in_space_is_the_same_step(train_on, reference, data, num_processes):
    """Three processes of a batch of 10: two streams each where samples are even; 8 do not divide 10, nor 6 streams."""
    runs = {f"{WORKLOADS[workload][0]}/{workload}": flags(data, workload, 3) for workload in WORKLOADS}
    folder = train_on(num_processes, runs)
    for workload, (program, _) in WORKLOADS.items():
        check(folder / program / workload, reference(workload), "float64")


def test_another_order_is_no_such_step(train_stream, reference):
    """The control: what the tests above compare does depend on which samples a step holds."""
    other, whole = train_stream("blocks", "other", 3, " --num_streams 5"), reference("blocks")
    assert relative(parameters(other), parameters(whole)) > 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# moves and kills


@pytest.mark.distributed
@pytest.mark.parametrize("moves", keep(["132", "213", "321"], ["213"]))
def test_a_run_moves_between_numbers_of_processes(train_on, reference, data, moves):
    """Two steps on N processes, three on another N, the rest on a third."""
    names = [f"{WORKLOADS[workload][0]}/{workload}" for workload in WORKLOADS]
    for num_processes, stop in zip(map(int, moves), (2, 5, 7), strict=True):
        more = f" --stop_after_step {stop}" + " --resume_from_checkpoint latest" * (stop > 2)
        cut = num_processes + 1
        runs = {name: flags(data, workload, cut, more=more) for name, workload in zip(names, WORKLOADS, strict=True)}
        folder = train_on(num_processes, runs)
    for name, workload in zip(names, WORKLOADS, strict=True):
        check(folder / name, reference(workload), "float64")


@pytest.mark.parametrize("workload", ["blocks", "chats"])
def test_a_kill_in_the_middle_of_a_step_changes_no_bit(train, data, after_forward, tmp_path, workload):
    """SIGKILL in the second micro-batch of a step, twice; the run goes on from its last checkpoint."""
    program = WORKLOADS[workload][0]
    more = " --checkpointing_steps 2 --resume_from_checkpoint latest"
    whole = train("whole", flags(data, workload, 4), program=program)
    for num_steps in (5, 2):

        def session(num_steps=num_steps):
            forwards = Counter()
            with StepCount() as steps:

                def die(module, *_, **__):
                    forwards[steps.value] += module.training
                    if steps.value == num_steps and forwards[num_steps] == 2:
                        os.kill(os.getpid(), signal.SIGKILL)

                after_forward(model_of(program), die)
                train("killed", flags(data, workload, 4, more=more), program=program)

        assert call_in_fork(session)[0] == -signal.SIGKILL
    killed = train("killed", flags(data, workload, 4, more=more), program=program)
    assert untimed_metrics(killed) == untimed_metrics(whole)
    assert torch.equal(parameters(killed), parameters(whole))
