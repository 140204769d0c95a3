"""scripts/train_embeddings.py: the step of one large batch, however it is cut, and what is left of a run."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import thorough
from common import all_metrics, evaluations, metrics, samples_of_steps
from compare import parameters, relative
from run_train_embeddings import KINDS, write_pairs
from transformers import AutoConfig, AutoModel, AutoTokenizer

from samestep.data import text_pairs
from samestep.data.builtin import python_docs
from samestep.data.tokenizer import train_wordpiece
from samestep.errors import UsageError
from samestep.recipe.catalog import load
from samestep.recipe.exclusions import find_problems
from samestep.training import retrieval
from samestep.training.checkpoint import checkpoints, read

NUM, NEGATIVES, MARGIN = 13, 2, -0.03
FROM_FOLDER = (
    " --architecture none --hidden_size none --num_hidden_layers none --num_attention_heads none --intermediate_size none "
    "--max_position_embeddings none --initializer_range none --vocab_size none --learning_rate 1e-3"
)
SIZES = {
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "vocab_size": 300,
    "initializer_range": 0.1,
}
BERT = {"model_type": "bert", **SIZES, "intermediate_size": 64, "max_position_embeddings": 32}
GPT2 = {"model_type": "gpt2", **SIZES, "n_positions": 32, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
# Name -> the model, its pooling, and the flags of its loss.
CASES = {
    "both_ways": (BERT, "mean", f"--symmetric true --num_negatives {NEGATIVES} --mask_duplicates false"),
    "siglip": (
        GPT2,
        "last_token",
        "--objective siglip --symmetric false --mask_duplicates false --similarity_bias -4 --learn_temperature true",
    ),
    "gist": (BERT, "mean", f"--symmetric true --num_negatives {NEGATIVES} --false_negative_margin {MARGIN}"),
    "matryoshka": (BERT, "cls", "--symmetric false --matryoshka_sizes 8 32 --learn_temperature true --temperature 0.1"),
}


def read_rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", NUM, NEGATIVES)


@pytest.fixture(scope="module")
def folders(pairs, tmp_path_factory):
    """Of each case, a model of transformers with random weights, and a tokenizer."""
    from datasets import Dataset

    texts = [text for row in read_rows(pairs) for text in row.values() if text]
    tokenizer = train_wordpiece(Dataset.from_dict({"text": texts}), 300, True)
    found = {}
    for name, (config, _, _) in CASES.items():
        torch.manual_seed(3)
        found[name] = tmp_path_factory.mktemp(name)
        AutoModel.from_config(AutoConfig.for_model(**config, pad_token_id=0)).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def flags(
    name: str, folders, pairs, cut: int | str, *, batch: int = NUM, dtype: str = "float64", steps: int = 1
) -> str:
    _, pooling, more = CASES[name]
    return (
        f" --train_file {pairs} --validation_fraction 0 --model_name_or_path {folders[name]} --pooling {pooling} {more} "
        f"--global_batch_size {batch} --learning_rate_batch_size {batch} --per_device_train_batch_size {cut} --dtype {dtype} "
        f"--dropout 0 --max_grad_norm none --max_train_steps {steps} --warmup_ratio none --num_warmup_steps 0 {FROM_FOLDER}"
    )


def gradient(folder: Path, decay: float = 0.9) -> dict[str, torch.Tensor]:
    """Read the gradient of a training's only step from AdamW's first moment, (1 - decay) g."""
    moments = read(checkpoints(folder)[-1], "optimizer")
    return {
        name.removesuffix("/exp_avg").removeprefix("model."): m.double() / (1 - decay)
        for name, m in moments.items()
        if name.endswith("/exp_avg")
    }


def find_loss(name: str, queries, documents, negatives, is_there, scale, bias):
    """Compute a case's loss by its formula, of vectors of any length, in one matrix."""

    def unit(x):
        return x / x.square().sum(-1, keepdim=True).sqrt()

    def cross_entropy(logits):
        return -(logits - logits.logsumexp(1, keepdim=True)).diagonal().mean()

    q, d = unit(queries), unit(documents)
    if name == "siglip":
        signs = 2 * torch.eye(len(q), dtype=q.dtype) - 1
        return -(1 / (1 + (-signs * (scale * q @ d.T + bias)).exp())).log().sum() / len(q)
    if name == "matryoshka":
        return sum(cross_entropy(scale * unit(queries[:, :n]) @ unit(documents[:, :n]).T) for n in (8, 32))
    texts = torch.cat([d, unit(negatives)])
    is_out, is_other = (
        torch.cat([torch.zeros(len(q), dtype=torch.bool), ~is_there]).repeat(len(q), 1),
        ~torch.eye(len(q)).bool(),
    )
    is_near = torch.zeros_like(is_other)
    if name == "gist":
        own = (q * d).sum(1, keepdim=True) + MARGIN
        is_out |= (q @ texts.T > own) & torch.nn.functional.pad(is_other, (0, len(negatives)), value=True)
        is_near = (d @ q.T > own) & is_other
        assert 0.1 < is_near.sum() / is_other.sum() < 0.9  # so that the margin matters
    there, back = scale * q @ texts.T, scale * d @ q.T
    return (
        cross_entropy(there.masked_fill(is_out, -math.inf)) + cross_entropy(back.masked_fill(is_near, -math.inf))
    ) / 2


@pytest.fixture(scope="module")
def truths(folders, pairs):
    """The gradient of one padded batch of all texts, by transformers and the formulas alone: the case's loss, and by name."""
    found, rows = {}, read_rows(pairs)
    for name, (_, pooling, _) in CASES.items():
        model = AutoModel.from_pretrained(folders[name], dtype=torch.float64).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.config.attention_probs_dropout_prob = 0.0
        texts = [row["query"] for row in rows] + [row["positive"] for row in rows]
        texts += [row[f"negative_{number}"] or "nothing" for row in rows for number in range(NEGATIVES)]
        batch = AutoTokenizer.from_pretrained(folders[name])(
            texts, padding=True, padding_side="right", truncation=True, max_length=24, return_tensors="pt"
        )
        hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        lengths = batch["attention_mask"].sum(1)
        if pooling == "mean":
            pooled = (hidden * batch["attention_mask"][..., None]).sum(1) / lengths[:, None]
        else:
            place = lengths - 1 if pooling == "last_token" else lengths * 0
            pooled = torch.stack([row[n] for row, n in zip(hidden, place, strict=True)])
        is_there = torch.tensor([bool(row[f"negative_{number}"]) for row in rows for number in range(NEGATIVES)])
        # The parameter is float32's logarithm of the scale
        log_scale = torch.tensor(math.log(10 if name == "matryoshka" else 20)).float().double().requires_grad_()
        bias = torch.tensor(-4.0, dtype=torch.float64, requires_grad=True)
        is_learned = "learn" in CASES[name][2]
        scale = log_scale.exp() if is_learned else 20.0
        parts = pooled[:NUM], pooled[NUM : 2 * NUM], pooled[2 * NUM :]
        loss = find_loss(name, *parts, is_there, scale, bias)
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients |= {"similarity_scale": log_scale.grad} if is_learned else {}
        gradients |= {"similarity_bias": bias.grad} if name == "siglip" else {}
        found[name] = loss.item(), gradients
    return found


def check(folder: Path, truth, bound: float) -> None:
    loss, true = truth
    found = gradient(folder)
    assert found.keys() == true.keys()
    ours, theirs = (torch.cat([part[name].flatten() for name in true]) for part in (found, true))
    assert relative(ours, theirs) < bound
    for name in ("similarity_scale", "similarity_bias"):
        if name in true:
            assert found[name].item() == pytest.approx(true[name].item(), rel=1e3 * bound)
    assert metrics(folder)[0]["loss"] == pytest.approx(loss, rel=max(1e-6, bound))


@pytest.mark.parametrize("cut", [NUM, 4, thorough(1)])
@pytest.mark.parametrize("name", CASES)
def test_every_cut_is_the_gradient_of_one_large_batch(train, folders, pairs, truths, name, cut):
    check(train(name, flags(name, folders, pairs, cut), program="train_embeddings"), truths[name], 1e-12)
    if cut == 4:
        single = train("single", flags(name, folders, pairs, cut, dtype="float32"), program="train_embeddings")
        check(single, truths[name], 1e-5)


def test_micro_batches_of_their_own_are_another_gradient(train, folders, pairs, truths):
    """The control: what the mean of micro-batches' losses would be is far away."""
    apart = train("apart", flags("both_ways", folders, pairs, 4, batch=4), program="train_embeddings")
    with pytest.raises(AssertionError):
        check(apart, truths["both_ways"], 0.1)


@pytest.mark.distributed
@pytest.mark.parametrize("num_processes", [2, thorough(3)])
def test_processes_take_the_same_step(train_on, train, folders, pairs, truths, num_processes):
    """Also with a step that leaves processes without a sample, with dropout, recomputed, with exact sums, resumed."""
    runs = {f"train_embeddings/{name}": flags(name, folders, pairs, 3) for name in CASES}
    idle = flags("both_ways", folders, pairs, 1, batch=2, steps=2)
    noisy = flags("both_ways", folders, pairs, 3, batch=5, steps=3).replace("--dropout 0", "--dropout 0.2")
    tail = flags("both_ways", folders, pairs, 3, batch=6, steps=3) + " --epoch_end keep"
    parted = flags("both_ways", folders, pairs, 3, batch=5, steps=4)
    exact = flags("both_ways", folders, pairs, 3, steps=3, dtype="float32").replace(
        "--per_device_train_batch_size 3", "--reproducible 3"
    )
    alone = {
        "idle": train("idle", idle, program="train_embeddings"),
        "tail": train("tail", tail, program="train_embeddings"),
        "noisy": train("noisy", noisy, program="train_embeddings"),
        "parted": train("whole", parted, program="train_embeddings"),
        "exact": train("exact", exact, program="train_embeddings"),
    }
    train("train_embeddings/parted", f"{parted} --stop_after_step 2", program="train_embeddings")
    runs |= {
        "train_embeddings/idle": idle,
        "train_embeddings/tail": tail,
        "train_embeddings/noisy": f"{noisy} --gradient_checkpointing",
        "train_embeddings/parted": f"{parted} --resume_from_checkpoint latest",
        "train_embeddings/exact": exact,
    }
    folder = train_on(num_processes, runs)
    for name in CASES:
        check(folder / "train_embeddings" / name, truths[name], 1e-12)
    for name, other in alone.items():
        found = parameters(folder / "train_embeddings" / name)
        bound = 0 if name == "exact" else 1e-12
        assert relative(found, parameters(other)) <= bound, name


def test_noise_is_that_of_the_sample(train, folders, pairs):
    noisy = flags("both_ways", folders, pairs, NUM).replace("--dropout 0", "--dropout 0.2")
    whole = parameters(train("whole", noisy, program="train_embeddings"))
    gradients = gradient(
        train("cut", noisy.replace(f"size {NUM} --dtype", "size 3 --dtype"), program="train_embeddings")
    )
    again = gradient(train("again", f"{noisy} --gradient_checkpointing", program="train_embeddings"))
    first = gradient(Path(train("first", noisy, program="train_embeddings")))
    without = gradient(train("without", flags("both_ways", folders, pairs, NUM), program="train_embeddings"))
    flat = [torch.cat([g[name].flatten() for name in first]) for g in (first, gradients, again, without)]
    assert relative(flat[1], flat[0]) < 1e-12
    assert relative(flat[2], flat[0]) < 1e-12
    assert relative(flat[3], flat[0]) > 0.1
    assert whole.isfinite().all()


def test_adapters(train, folders, pairs, truths):
    """At first B is 0, so that A has no gradient, and B has s dW A^T; the saved folder has them merged."""
    more = " --lora_rank 2 --lora_alpha 4 --weight_decay 0"
    folder = train("lora", flags("both_ways", folders, pairs, 4) + more, program="train_embeddings")
    found, true = gradient(folder), truths["both_ways"][1]
    adapters = read(checkpoints(folder)[-1], "model")
    names = [name for name in found if "lora_B" in name]
    assert len(names) == 12
    for name in names:
        layer = (
            name.removeprefix("base_model.model.").removesuffix(".lora_B.default.weight").removesuffix(".lora_B.weight")
        )
        layer = layer.removeprefix("model.base_model.model.")
        a = next(tensor for other, tensor in adapters.items() if layer in other and "lora_A" in other)
        assert relative(found[name], 2.0 * true[f"{layer}.weight"] @ a.double().T) < 1e-11, name
    assert not (folder / "adapter_config.json").exists()
    assert AutoModel.from_pretrained(folder).config.hidden_size == 32


@pytest.mark.distributed
def test_memory_that_runs_out_repeats_the_step(run_processes):
    """In the forwards before a step no process must wait for another, which has left it; in others as in any step."""
    found = run_processes("run_train_embeddings", 2)[0]
    for kind in KINDS:
        assert relative(found[kind][0], found[None][0]) < 1e-12, kind
        assert any("memory ran out" in line["event"] for line in found[kind][1]), kind
    assert not found[None][1]


EMBEDDERS = {
    "bert": "--pooling mean --num_hidden_layers 2",
    "qwen3": "--architecture qwen3 --pooling last_token --vocab_size 400 --query_prefix instruct: --num_key_value_heads 1",
}


@pytest.mark.parametrize("name", EMBEDDERS)
def test_sentence_transformers_computes_the_same_vectors(train, pairs, name):
    from sentence_transformers import SentenceTransformer

    more = f" --train_file {pairs} --validation_fraction 0 --max_train_steps 2 {EMBEDDERS[name]}"
    folder = train(name, more, program="train_embeddings")
    model = SentenceTransformer(str(folder), device="cpu")
    recipe = load(str(folder / "recipe.yaml"))
    source, _ = text_pairs.build(recipe)
    texts = source.collate([source.draw(0, number) for number in range(NUM)])
    rows = read_rows(pairs)
    from samestep.models.text_embeddings import EmbeddingSums

    sums = EmbeddingSums(AutoModel.from_pretrained(folder), recipe.pooling).eval()
    texts.pop("counts")
    with torch.no_grad():
        ours = sums(**texts)[1].view(NUM, 2, -1)
    queries = model.encode_query([row["query"] for row in rows], convert_to_tensor=True)
    documents = model.encode_document([row["positive"] for row in rows], convert_to_tensor=True)
    assert torch.allclose(ours[:, 0], queries, atol=1e-5)
    assert torch.allclose(ours[:, 1], documents, atol=1e-5)
    assert queries.norm(dim=1) == pytest.approx(1, abs=1e-5)
    assert model.max_seq_length == recipe.max_seq_length


def test_evaluations_and_the_best_model(train, pairs):
    more = f" --train_file {pairs} --validation_fraction 0.4 --eval_steps 2 --max_train_steps 6 --per_device_train_batch_size 3"
    folder = train(
        "best", f"{more} --load_best_model_at_end --metric_for_best_model recall_at_1", program="train_embeddings"
    )
    lines = evaluations(folder)
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    best = max(lines, key=lambda line: line["eval_recall_at_1"])
    assert json.loads((folder / "all_results.json").read_text())["best_step"] == best["step"]
    assert (folder / "best" / "model.safetensors").exists()
    assert all(0 <= line["eval_ndcg_at_10"] <= line["eval_recall_at_10"] <= 1 for line in lines)
    other = train("other", f"{more} --per_device_eval_batch_size 1", program="train_embeddings")
    assert [line["eval_loss"] for line in evaluations(other)] == pytest.approx(
        [line["eval_loss"] for line in lines], rel=1e-4
    )


def test_scores_are_those_of_a_sorted_list():
    generator = torch.Generator().manual_seed(0)
    queries, texts = torch.randn(300, 8, generator=generator), torch.randn(300, 2, 8, generator=generator)
    texts[:, 0] += queries
    keys = torch.arange(600).view(300, 2)
    texts[7, 0], keys[7, 0] = texts[3, 0], keys[3, 0]  # one text of two queries
    keys[11, 1] = -1
    flat = {key.item(): text for key, text in zip(keys.flatten(), texts.flatten(0, 1), strict=True) if key >= 0}
    ranks = []
    for query, own in zip(queries, keys[:, 0].tolist(), strict=True):
        order = sorted(flat, key=lambda key: -(query @ flat[key]).item())
        ranks.append(1 + order.index(own))
    found = retrieval.score(queries, texts, keys)
    assert found["recall_at_1"] == pytest.approx(sum(rank == 1 for rank in ranks) / 300)
    assert found["recall_at_10"] == pytest.approx(sum(rank <= 10 for rank in ranks) / 300)
    assert found["ndcg_at_10"] == pytest.approx(sum(1 / math.log2(1 + rank) for rank in ranks if rank <= 10) / 300)
    assert 0.1 < found["recall_at_1"] < 0.9


def test_a_model_that_says_the_same_of_all_texts_finds_nothing():
    rows = torch.ones(20, 4)
    assert retrieval.score(rows, rows[:, None], torch.arange(20)[:, None])["recall_at_10"] == 0
    one = retrieval.score(rows, rows[:, None], torch.zeros(20, 1, dtype=torch.int64))
    assert one["recall_at_1"] == 1  # there is one text only


def test_runs_of_before_false_negatives_were_left_out_go_on():
    """Their fingerprint is without the field; a margin changes it."""
    fields = [
        load("embeddings_small_cpu", changes).decisive_fields() for changes in ({}, {"false_negative_margin": 0.1})
    ]
    assert ["false_negative_margin" in each for each in fields] == [False, True]


def test_duplicates_are_no_negatives(train, tmp_path):
    """All texts alike: masked, nothing is left to compare; not masked, the loss is that of guessing. Nothing is NaN."""
    file = tmp_path / "same.jsonl"
    file.write_text('{"query": "one", "positive": "two"}\n' * 8)
    more = f" --train_file {file} --validation_fraction 0.25 --global_batch_size 6 --max_train_steps 2 --vocab_size 40"
    masked = train("masked", f"{more} --mask_duplicates true", program="train_embeddings")
    plain = train("plain", f"{more} --mask_duplicates false", program="train_embeddings")
    assert [line["loss"] for line in metrics(masked)] == pytest.approx([0, 0], abs=1e-6)
    assert [line["loss"] for line in metrics(plain)] == pytest.approx([math.log(6)] * 2, rel=1e-5)
    for line in all_metrics(masked) + all_metrics(plain):
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))


@pytest.mark.parametrize("temperature", ["0.01", "100"])
def test_temperatures_at_their_bounds(train, pairs, temperature):
    more = f" --train_file {pairs} --validation_fraction 0 --max_train_steps 3 --learn_temperature true --learning_rate 0.1"
    folder = train("bound", f"{more} --temperature {temperature}", program="train_embeddings")
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in metrics(folder))


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({"query": "a"}, "", "none of its columns 'query' is called positive, pos, answer"),
        ({"query": "a", "positive": ""}, "", "'positive' is empty: fill it in, or remove the row"),
        ({"query": " ", "positive": "b"}, "", "'query' is empty"),
        ({"query": "a", "positive": 3}, "", "'positive' holds int, not text"),
        ({"query": "a", "positive": "b", "negative": 3}, "--num_negatives 1", "'negative' holds int, not text"),
        ({"query": "a", "positive": "b"}, "--num_negatives 1", "but num_negatives is not 0"),
        (
            {"query": "a", "positive": "b", "score": 0.1},
            "",
            "column 'score' says how alike the two texts are, but each pair is trained as alike. Keep the pairs that are, and "
            "name their columns: --query_column query --positive_column positive",
        ),
        ({"query": "a", "positive": "b"}, "--query_column q --positive_column positive", "has no column 'q'"),
        ({}, "--query_column q", "of query_column and positive_column one is set: name both, or neither"),
        ({}, "--global_batch_size 1", "global_batch_size is 1, but the loss compares the samples of a step"),
        ({}, "--temperature 0", "temperature is 0.0, must be from 0.01 to 100"),
        ({}, "--objective siglip", "symmetric is True, but objective is siglip, whose pairs stand alone"),
        ({}, "--noise_scale_steps 2", "noise_scale_steps is 2, but the loss compares samples"),
        ({}, "--matryoshka_sizes 64 8", "matryoshka_sizes"),
        (
            {"query": "a", "positive": "b"},
            "--matryoshka_sizes 64",
            "matryoshka_sizes has 64, but vectors have 32 numbers",
        ),
        ({}, "--lora_rank 2 --lora_alpha 4 --learn_temperature true", "learn_temperature is true, but lora_rank is 2"),
    ],
)
def test_what_is_refused(train, tmp_path, row, more, message):
    file = tmp_path / "rows.jsonl"
    good = {"query": "one", "positive": "two"} | ({"negative": "three"} if "negative" in row else {})
    good |= {name: value for name, value in row.items() if name == "score"}
    file.write_text(
        "\n".join(json.dumps(each) for each in ([row] if len(row) == 1 else [good] * 6 + [row or good])) + "\n"
    )
    words = f" --train_file {file} --validation_fraction 0 --vocab_size 60 {more}"
    with pytest.raises((UsageError, SystemExit), match=None) as error:
        train("refused", words, program="train_embeddings")
    assert message.replace("True", "true") in str(error.value).replace("True", "true")


def test_a_score_beside_named_columns_is_meant():
    assert text_pairs.Columns("query", "positive").find("a.csv", ["query", "positive", "score"]) == (
        "query",
        "positive",
    )


def test_algorithms_that_send_less_are_refused():
    with pytest.raises(UsageError, match=r"communication is .*, but the loss compares the samples of all processes"):
        load("embeddings_small_cpu", {"communication": "top_k 0.01 of 4 workers"})
    with pytest.raises(UsageError, match=r"batch_schedule is .*, but the loss compares samples"):
        load("embeddings_small_cpu", {"batch_schedule": "noise 0.1 from 16", "lr_scaling_rule": "none"})
    (problem,) = find_problems(load("embeddings_small_cpu"), SimpleNamespace(fault_tolerance="step"))
    assert problem.startswith("fault_tolerance is step, but the loss compares the samples of all processes")


def test_a_row_that_is_skipped(train, pairs, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(pairs.read_text() + '{"query": "", "positive": "b"}\n')
    more = f" --train_file {file} --validation_fraction 0 --max_train_steps 1 --on_bad_row skip --record_samples"
    folder = train("skipped", more, program="train_embeddings")
    assert {sample for _, sample in samples_of_steps(folder)[1]} <= set(range(NUM))
    assert "'query' is empty" in (folder / "skipped_rows.jsonl").read_text()


def test_pairs_of_a_module():
    source = b'''"""A module. """
class Box:
    """Hold things. A box has a lid and walls, and what is put into it stays there until it is taken out."""
    def put(self, thing, *, count=1):
        """Put a thing into the box so often as count says, which must be positive or nothing happens"""
'''
    found = dict(python_docs._list_docstrings(python_docs._parse(source), "boxes"))
    assert list(found) == ["boxes", "boxes.Box", "boxes.Box.put(self, thing, *, count=1)"]


@pytest.mark.thorough
def test_pairs_of_the_library():
    recipe = load("embeddings_small_cpu")
    rows = text_pairs.load_rows(train_file=None, dataset_name=recipe.dataset_name).rows
    train, held_out = text_pairs.split_by_source(rows, recipe.validation_fraction)
    assert len(rows) > 5000
    assert not set(train["source"]) & set(held_out["source"])
    assert 0.08 < len(held_out) / len(rows) < 0.2
    assert len({*rows["query"], *rows["positive"]}) == 2 * len(rows)
