"""Recipes of today: ModernBERT without padding, causal models of other architectures, the same step in every cut."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import ROOT, fresh_accelerator, launch_environment
from compare import check
from rooms import read_card
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from samestep.data import sentence_pairs, token_blocks
from samestep.data.ragged import make_rows, make_tables
from samestep.errors import UsageError
from samestep.models import causal_lm_pretraining, modernbert_pretraining
from samestep.models.attention import KERNELS, PREFIX
from samestep.recipe import run_settings
from samestep.recipe.catalog import load
from samestep.step.losses import IGNORED

TINY = "--hidden_size 32 --num_hidden_layers 2 --initializer_range 0.1 --learning_rate 5e-3 --max_grad_norm 0.2 "
TINY += "--max_train_steps 10 --num_warmup_steps 1 --speed safe "
GPT = "--recipe gpt_modern_small_cpu --vocab_size 400 --block_size 48 --max_position_embeddings 48 --num_attention_heads 4 "
GPT += "--num_key_value_heads 2 --intermediate_size 64 " + TINY
BERT = "--recipe bert_modern_small_cpu --vocab_size 600 --max_seq_length 48 --max_position_embeddings 48 "
BERT += "--num_attention_heads 2 --intermediate_size 48 --local_attention 8 --global_attn_every_n_layers 2 " + TINY
WORKLOADS = {
    "gpt": ("pretrain_gpt2", GPT),
    "gpt_documents": ("pretrain_gpt2", GPT + "--document_mask true "),
    "bert": ("pretrain_bert", BERT),
}


def argv(workload: str, corpus, folder, flags: str) -> list[str]:
    words = [*WORKLOADS[workload][1].split(), "--train_file", str(corpus), "--output_dir", str(folder)]
    return words + flags.split()


@pytest.fixture
def train_modern(scripts, corpus, tmp_path):
    def run(workload: str, name: str, flags: str):
        fresh_accelerator()
        assert scripts[WORKLOADS[workload][0]].main(argv(workload, corpus, tmp_path / name, flags)) == 0
        return tmp_path / name

    return run


def parse(workload: str, corpus, flags: str = ""):
    program, _ = WORKLOADS[workload]
    tasks = {"pretrain_gpt2": "causal_lm_pretraining", "pretrain_bert": "modernbert_pretraining"}
    return run_settings.parse(argv(workload, corpus, "unused", flags), tasks[program], "")[0]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_cut_in_time_is_the_same_step(train_modern, workload):
    flags = "--global_batch_size 10 --dtype float64 --per_device_train_batch_size "
    whole, cut = (train_modern(workload, f"b{b}", f"{flags}{b}") for b in (10, 3))
    check(cut, whole, "float64")


@pytest.mark.thorough
@pytest.mark.distributed
def test_every_cut_in_space_is_the_same_step(train_modern, trainings, corpus, tmp_path):
    """Also with weights that are sharded; in float32, where 3 samples are divided among 2 processes, and one gets none."""
    flags = "--global_batch_size 10 --dtype float64 --per_device_train_batch_size 3"
    for config in ("2xcpu", "fsdp2_2xcpu"):
        calls = [
            [WORKLOADS[workload][0], *argv(workload, corpus, tmp_path / config / workload, flags)]
            for workload in ("gpt_documents", "bert")
        ]
        environment = launch_environment(ROOT / "accelerate_configs" / f"{config}.yaml", "--mixed_precision", "no")
        trainings.run([str(tmp_path), json.dumps(calls)], 2, environment=environment, can_repeat=False)
    for workload in ("gpt_documents", "bert"):
        whole = train_modern(workload, f"whole-{workload}", flags)
        for config in ("2xcpu", "fsdp2_2xcpu"):
            check(tmp_path / config / workload, whole, "float64")


def test_a_row_of_modernbert_is_its_samples_alone(corpus, varlen_on_cpus):
    """Of every kernel, in layers that see all and in layers with a window. Transformers rotates in float32."""
    recipe = parse("bert", corpus, "--short_seq_probability 0.7")
    source, _ = sentence_pairs.build(recipe)
    torch.manual_seed(0)
    model = modernbert_pretraining.PretrainingSums.from_recipe(recipe, source).double()
    samples = sorted((source.draw(0, number) for number in range(7)), key=lambda pair: -pair.length)
    assert len({sample.length for sample in samples}) > 3
    batch = source.collate(samples)
    batch.pop("counts")
    gradients = {}
    for kernel in KERNELS:
        model.bert.set_attn_implementation(PREFIX + kernel)
        model.zero_grad()
        sums, _ = model(**batch)
        sums.sum().backward()
        gradients[kernel] = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.bert.set_attn_implementation("eager")
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, places, labels in map(source.mask, samples):
        targets = np.full(len(tokens), IGNORED)
        targets[places] = labels
        logits = model.bert(input_ids=torch.from_numpy(tokens)[None]).logits[0]
        loss = loss + F.cross_entropy(logits, torch.from_numpy(targets), ignore_index=IGNORED, reduction="sum")
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert sums.item() == pytest.approx(loss.item(), rel=1e-9)
    for gradient in gradients.values():
        assert ((gradient - expected).norm() / expected.norm()).item() < 1e-6


def test_padding_sees_something_in_float16():
    """Where padding saw no key, its scores would all be infinite, and its softmax and all gradients NaN."""
    tables = make_tables([make_rows(np.array([60, 3, 2]))], 1)
    (mask,) = modernbert_pretraining._narrow(tables, 4, torch.float16)
    scores = torch.full_like(mask, -100.0)
    assert (scores + mask).softmax(-1).isfinite().all()


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_a_row_of_documents_is_its_documents_alone(corpus, architecture):
    flags = f"--architecture {architecture} --document_mask true --zero_init_projections false"
    recipe = parse("gpt", corpus, flags + (" --num_key_value_heads none" if architecture == "gpt2" else ""))
    source, _ = token_blocks.build(recipe)
    torch.manual_seed(0)
    model = causal_lm_pretraining.PretrainingSums.from_recipe(recipe, source).double()
    drawn = (source.draw(0, number) for number in range(50))
    runs = sorted(drawn, key=lambda run: np.count_nonzero(run.tokens[1 : run.length] == source.end_of_text))[-5:]
    batch = source.collate(runs)
    assert batch.pop("counts").item() == sum(run.length for run in runs)
    sums, _ = model(**batch)
    total = 0.0
    with model.own_attention() as own, torch.no_grad():
        for run in runs:
            starts = [
                0,
                *(place for place in range(1, run.length) if run.tokens[place] == source.end_of_text),
                run.length,
            ]
            for first, end in itertools.pairwise(starts):
                tokens = torch.from_numpy(run.tokens[first : end + 1].astype(np.int64))
                logits = own(input_ids=tokens[None, :-1]).logits[0]
                total += F.cross_entropy(logits, tokens[1:], reduction="sum").item()
    assert len(batch["ends"]) > len(runs) + 1
    assert sums.item() == pytest.approx(total, rel=1e-12)


def test_projections_begin_with_zeros():
    recipe = load("gpt_modern_small_cpu", {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2})
    zeros = {
        name
        for name, p in causal_lm_pretraining.PretrainingSums.from_recipe(recipe, None).named_parameters()
        if not p.any()
    }
    layers = [f"model.model.layers.{number}" for number in range(2)]
    assert zeros == {f"{layer}.{name}.weight" for layer in layers for name in ("self_attn.o_proj", "mlp.down_proj")}


def test_an_architecture_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="architecture qwen33 is no model_type that transformers knows"):
        causal_lm_pretraining.build_model(load("gpt_modern_small_cpu", {"architecture": "qwen33"}))
    recipe = load("gpt_modern_small_cpu", {"architecture": "olmoe", "hidden_size": 32, "num_attention_heads": 2})
    with pytest.raises(UsageError, match="zero_init_projections is true, but the last matrices"):
        causal_lm_pretraining.PretrainingSums.from_recipe(recipe, None)


@pytest.mark.parametrize("name", ["gpt_modern_small_cpu", "sft_small_cpu"])
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": 129}, "hidden_size 129 is not a multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads . is not a multiple of num_key_value_heads 3"),
        ({"max_position_embeddings": 8}, "exceeds max_position_embeddings 8"),
    ],
    ids=str,
)
def test_a_shape_that_no_decoder_has_is_refused(name, changes, problem):
    with pytest.raises(UsageError, match=problem):
        load(name, changes)


@pytest.mark.rooms
@pytest.mark.parametrize(("growth", "is_told"), [("8, 16 at 0.5", True), ("seesaw from 8", False)])
def test_the_remedy_of_a_growing_batch_is_one_that_it_takes(growth, is_told):
    """Seesaw decides the learning rate by itself."""
    with pytest.raises(UsageError, match="which knows one batch") as error:
        load("gpt2_small_cpu", {"batch_schedule": growth})
    assert ("rate by sqrt" in str(error.value)) == is_told


def test_masked_samples_are_one_segment(corpus):
    recipe = parse("bert", corpus)
    source, held_out = sentence_pairs.build(recipe)
    assert recipe.loss_weights == {"mlm": 1.0}
    assert len(held_out)
    sample = source.draw(1, 3)
    tokens, places, labels = source.mask(sample)
    original = tokens.copy()
    original[places] = labels
    assert original.tolist() == [source.cls, *sample.first, source.sep]
    assert len(tokens) == sample.length <= 48
    assert len(places) == round(0.3 * np.count_nonzero(~source.is_special[original]))
    assert source.longest().length == 48
    assert source.collate([])["counts"].tolist() == [0]
    lengths = [source.draw(0, number).length for number in range(len(source))]
    assert max(lengths) == 48


def test_what_is_published_loads(train_modern):
    """With the loss that the run evaluated, by transformers' own forward."""
    folder = train_modern("gpt", "gpt", "--max_train_steps 3 --sample_prompt x --sample_length 5")
    assert (folder / "sample.txt").read_text()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    folder = train_modern("bert", "bert", "--max_train_steps 3")
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.sep_token_id == tokenizer.sep_token_id
    assert "ModernBertForMaskedLM.from_pretrained" in read_card(folder)
