"""The programs on a stream: the same steps in any cut, on any processes, after moves and kills, over rows that are bad."""

import json
import os
import re
import signal
from collections import Counter

import chat_bases
import pytest
import torch
from cases import keep, thorough
from common import DROPOUT, ROOT, model_of, tasks_of, tiny_argv
from compare import check, parameters, relative, untimed_metrics
from forks import call_in_fork
from hooks import StepCount

from samestep import cli
from samestep.contrib.streaming import segments
from samestep.data import seq2seq
from samestep.data.arrow import Dataset
from samestep.data.tokenizer import train_wordpiece
from samestep.errors import UsageError, exit_code
from samestep.recipe import run_settings
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


EACH_CLASS = ("blocks", "mixture", "bert", "labels", "sources", "embeddings")
"""A workload for each class of samples of `contrib.streaming`; the others are of these classes, too."""
MOVES = [("213", EACH_CLASS), thorough("213", [name for name in WORKLOADS if name not in EACH_CLASS])]
MOVES += [thorough(moves, list(WORKLOADS)) for moves in ("132", "321")]


@pytest.mark.distributed
@pytest.mark.parametrize(("moves", "workloads"), MOVES, ids=lambda value: value if isinstance(value, str) else None)
def test_a_run_moves_between_numbers_of_processes(train_on, reference, data, moves, workloads):
    """Two steps on N processes, three on another N, the rest on a third."""
    names = [f"{WORKLOADS[workload][0]}/{workload}" for workload in workloads]
    for num_processes, stop in zip(map(int, moves), (2, 5, 7), strict=True):
        more = f" --stop_after_step {stop}" + " --resume_from_checkpoint latest" * (stop > 2)
        cut = num_processes + 1
        runs = {name: flags(data, workload, cut, more=more) for name, workload in zip(names, workloads, strict=True)}
        folder = train_on(num_processes, runs)
    for name, workload in zip(names, workloads, strict=True):
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


def test_a_resumed_run_reads_no_row_again(train, data, tmp_path):
    """What was read before the checkpoint is garbage when the run goes on; its first rows are looked at again."""
    file = tmp_path / "one.jsonl"
    lines = [json.dumps({"text": "word " * 9 + f"{row:3d}"}) for row in range(400)]
    file.write_text("\n".join(lines) + "\n")
    more = f" --train_file {file} --packing false --max_train_steps 14"
    whole = train("whole", flags(data, "documents", 4, more=more), program="pretrain_gpt2")
    train("run", flags(data, "documents", 4, more=f"{more} --stop_after_step 12"), program="pretrain_gpt2")
    lines[70:90] = ["[" * len(line) for line in lines[70:90]]
    file.write_text("\n".join(lines) + "\n")
    again = train(
        "run", flags(data, "documents", 4, more=f"{more} --resume_from_checkpoint latest"), program="pretrain_gpt2"
    )
    assert torch.equal(parameters(again), parameters(whole))
    with pytest.raises(UsageError, match=r"one.jsonl, byte .*not a JSON object"):
        train("anew", flags(data, "documents", 4, more=more), program="pretrain_gpt2")


# ---------------------------------------------------------------------------------------------------------------------
# rows with a fault


def read_skipped(output_dir):
    """Read the list of skipped rows: end of each place -> reason."""
    rows = [json.loads(line) for line in (output_dir / "skipped_rows.jsonl").read_text().splitlines()]
    found = {row["place"].rpartition("/")[2]: row["reason"] for row in rows}
    assert len(found) == len(rows), "each row once"
    return found


BAD = ['{"text": ', "[1]", '{"other": 1}', '{"messages": [{"role": "user", "content": 3}], "prompt": 1, "text": 2}']


@pytest.fixture
def damage(data, tmp_path):
    """Copy shards, texts cut short, with rows that have a fault; return the folder, and the places of those."""

    def run(name):
        folder, places = tmp_path / "damaged", []
        folder.mkdir()
        for number, file in enumerate(sorted((data / name).glob("*.jsonl"))):
            rows = map(json.loads, file.read_text().splitlines())
            lines = [json.dumps(row | {"text": row["text"][:60]} if name == "texts" else row) for row in rows]
            lines[number % 3 : number % 3] = [BAD[number % len(BAD)]]
            begin = sum(len(line.encode()) + 1 for line in lines[: number % 3])
            places.append(f"{number}.jsonl, byte {begin}")
            (folder / file.name).write_text("\n".join(lines) + "\n")
        return folder, places

    return run


@pytest.mark.parametrize(("workload", "name"), [("blocks", "texts"), ("chats", "chats")])
def test_rows_with_a_fault_are_listed_over_kills(train, data, damage, after_forward, workload, name):
    """Two epochs meet them; the list has each once, and a session that is killed leaves nothing out of it."""
    folder, places = damage(name)
    program = WORKLOADS[workload][0]
    more = f" --train_file {folder} --on_bad_row skip --checkpointing_steps 1 --max_train_steps 14"
    whole = train("whole", flags(data, workload, 4, more=more), program=program)
    skipped = read_skipped(whole)
    assert sorted(skipped) == sorted(places)
    assert any("JSON list" in reason for reason in skipped.values())
    (whole / "skipped_rows.jsonl").write_text('{"place": "of an earlier run"}\n')

    def session():
        with StepCount() as steps:
            after_forward(
                model_of(program), lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL) if steps.value == 2 else None
            )
            train(
                "whole",
                flags(data, workload, 4, more=more + " --overwrite_output_dir"),
                program=program,
            )

    assert call_in_fork(session)[0] == -signal.SIGKILL
    file = whole / "skipped_rows.jsonl"
    file.write_text(file.read_text() + '{"place": "cut o')
    more += " --resume_from_checkpoint latest"
    train("whole", flags(data, workload, 4, more=more), program=program)
    assert read_skipped(whole) == skipped


@pytest.mark.distributed
def test_three_processes_list_rows_with_a_fault_once(train_on, data, damage):
    folder, places = damage("texts")
    more = f" --train_file {folder} --on_bad_row skip --max_train_steps 14"
    names = {f"pretrain_gpt2/{workload}": flags(data, workload, 2, more=more) for workload in ("blocks", "documents")}
    output = train_on(3, names)
    for name in names:
        assert sorted(read_skipped(output / name)) == sorted(places)


def test_a_row_with_a_fault_ends_the_run_unless_it_is_skipped(train, data, damage):
    folder, _ = damage("chats")
    with pytest.raises(UsageError, match=r"0.jsonl, byte 0: .*on_bad_row skip"):
        train("refused", flags(data, "chats", 4, more=f" --train_file {folder}"), program="finetune_causal_lm")


def test_files_without_a_row_are_named(data, tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("\n")
    changes = {"streaming": True, "train_file": [str(tmp_path)], "tokenizer_name": str(data / "bert")}
    with pytest.raises(
        UsageError, match=r"^train_file has no row in .*a\.jsonl and 1 more file: give files that hold rows"
    ):
        segments.StreamedSentencePairs.build(
            load("bert_small_cpu", changes | {"validation_fraction": 0.0}), None, "skip"
        )


@pytest.mark.parametrize("workload", ["mixture", "preferences"])
def test_mixtures_and_pairs_skip_rows_with_a_fault(train, data, tmp_path, workload):
    """As if they had never been there: the same weights as of the shards without them."""
    program, own = WORKLOADS[workload]
    last = own.split("--train_file ")[1].split(" --")[0].split()[-1].replace("DATA", str(data))
    bad = tmp_path / last.rpartition("/")[2]
    lines = (data / bad.name).read_text().splitlines()
    bad.write_text("\n".join([*BAD[:3], *lines[:7], BAD[3], *lines[7:]]) + "\n")
    runs = {}
    for name, file in (("good", data / bad.name), ("bad", bad)):
        changed = flags(data, workload, 4, more=" --on_bad_row skip").replace(f" {data}/{bad.name}", f" {file}", 1)
        runs[name] = train(name, changed, program=program)
    assert torch.equal(parameters(runs["bad"]), parameters(runs["good"]))
    assert len(read_skipped(runs["bad"])) == len(BAD)
    assert not (runs["good"] / "skipped_rows.jsonl").exists()


def test_rows_that_a_rule_leaves_out_are_counted(train, data, capsys):
    train("short", flags(data, "chats", 4, more=" --max_seq_length 27"), program="finetune_causal_lm")
    said = capsys.readouterr().out
    assert re.search(r"left out in this session: [0-9]+ rows, longer than max_seq_length 27", said)
    with pytest.raises(UsageError, match=r"no row that can be used in a whole epoch, .*longer than max_seq_length 8"):
        train("none", flags(data, "chats", 4, more=" --max_seq_length 8"), program="finetune_causal_lm")


# ---------------------------------------------------------------------------------------------------------------------
# what is refused, and what is special to a task


@pytest.mark.parametrize(
    ("program", "more", "message"),
    [
        ("pretrain_bert", "--shuffle_buffer_size 1", "shuffle_buffer_size is 1"),
        ("pretrain_bert", "--recipe bert_modern_small_cpu", "tokenizer_name is null, but streaming"),
        ("finetune_classifier", "--num_labels none", "labels of a stream cannot be counted before"),
        ("finetune_classifier", "--validation_split_name test --dataset_name x", "held-out rows are read whole"),
        ("finetune_seq2seq", "--modality speech --dataset_name none --train_file x.jsonl", "only texts are streamed"),
        ("train_embeddings", "--num_train_epochs 1 --max_train_steps none", "number of samples is not known"),
    ],
)
def test_what_makes_no_sense_of_a_stream_is_refused(program, more, message):
    argv = tiny_argv(program, ROOT / "x.jsonl", "run", f"--streaming --validation_fraction 0 {more}")
    with pytest.raises(UsageError, match=message):
        run_settings.parse(argv, tasks_of(program), "")


@pytest.mark.rooms
@pytest.mark.parametrize("workload", ["chats", "sources"])
def test_samples_are_shown_as_they_come(data, capsys, workload, tmp_path):
    """The first samples of the run with their places; a page, which counts all samples, is refused."""
    words = (
        f" --validation_fraction 0 --num_train_epochs none --max_train_steps 9 --tokenizer_name DATA/tokenizer{STREAM}"
    )
    recipe = {"chats": "sft_small_cpu", "sources": "seq2seq_small_cpu"}[workload]
    words = f"show-data {recipe}{words}{WORKLOADS[workload][1]}".replace("DATA", str(data))
    words = re.sub(r" --num_generations \S+", " --max_seq_length 27" * (workload == "chats"), words)
    assert exit_code(lambda: cli.main(words.split())) == 0
    out = capsys.readouterr().out
    assert re.findall(r"--- sample (\d) \(.*/\d\.jsonl, byte \d+\)", out) == ["0", "1", "2"]
    assert out.count("]]") >= 3
    assert ("left out until here: " in out) == (workload == "chats")  # some of them are longer than 27 tokens
    assert "a stream of 7 shards in 6 virtual streams" in out
    assert exit_code(lambda: cli.main([*words.split(), "--html", str(tmp_path / "page.html")])) == 2
    assert "html is set, but streaming is true" in capsys.readouterr().err


def test_labels_without_held_out_texts_are_numbers(train, data, tmp_path):
    rows = [{"text": f"a {'b ' * (row % 5)}", "label": row % 3} for row in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = f" --train_file {tmp_path}/rows.jsonl --validation_file none --validation_fraction 0 --num_labels"
    output_dir = train("three", flags(data, "labels", 4, more=f"{more} 3"), program="finetune_classifier")
    assert json.loads((output_dir / "config.json").read_text())["id2label"] == {"0": "0", "1": "1", "2": "2"}
    with pytest.raises(UsageError, match=r"label '2' is none of the classes '0', '1'"):
        train("two", flags(data, "labels", 4, more=f"{more} 2"), program="finetune_classifier")


def test_the_second_segment_of_another_document_is_a_neighbour(data):
    """As often as the recipe says, from a document that was read with the first; alone in its buffer none is random."""
    changes = {"streaming": True, "train_file": [str(data / "texts")], "tokenizer_name": str(data / "bert")}
    changes |= {"dataset_name": None, "validation_fraction": 0.0, "max_train_steps": 5, "num_train_epochs": None}
    changes |= {"vocab_size": 600, "num_streams": 7, "max_seq_length": 48}
    train, _ = segments.StreamedSentencePairs.build(load("bert_small_cpu", changes), None, "refuse")
    pairs = [train.draw(0, number) for number in range(700)]
    assert 0.4 < sum(pair.is_random for pair in pairs) / len(pairs) < 0.6
    assert all(pair.length <= 48 for pair in pairs)
    assert [train.draw(0, number).second.tolist() for number in (3, 99, 5)] == [
        pairs[number].second.tolist() for number in (3, 99, 5)
    ]
    changes |= {"shuffle_buffer_size": 1, "next_sentence_probability": 1.0}
    alone, _ = segments.StreamedSentencePairs.build(load("bert_small_cpu", changes), None, "refuse")
    alone.next_sentence_probability = 0.5
    assert not any(alone.draw(0, number).is_random for number in range(100))
