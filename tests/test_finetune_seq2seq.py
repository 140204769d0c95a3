"""scripts/finetune_seq2seq.py: the step of whole samples, one at a time, however it is cut, and what is left of a run."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import keep, thorough
from common import SEQ2SEQ_FROM_FOLDER, evaluations, metrics
from compare import parameters, relative
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from samestep.data import seq2seq
from samestep.errors import UsageError
from samestep.recipe.catalog import load
from samestep.training.checkpoint import checkpoints, read

NUM, STEPS, RATE, SMOOTHING = 13, 3, 1e-3, 0.1
BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2),
    **{"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 48, "init_std": 0.1},
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
# Family -> the model's configuration; its decoder begins with the token for padding, or the one that ends a text.
FAMILIES = {
    "t5": ("t5", T5, "pad"),
    "mt5": ("mt5", T5 | {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}, "pad"),
    "bart": ("bart", BART, "eos"),
    "mbart": ("mbart", BART | {"scale_embedding": True}, "eos"),
    "m2m_100": ("m2m_100", BART, "eos"),
    "pegasus": ("pegasus", BART, "pad"),
}
WORDS = "red green blue stone river cloud table chair apple light night star moon sun wind rain fire snow".split()


def write_pairs(file: Path, num: int = NUM, names: tuple[str, str] = ("source", "target")) -> Path:
    """Write sources and targets of very different lengths, neither as long as the other."""
    with file.open("w", encoding="utf-8") as lines:
        for row in range(num):
            source = [WORDS[(3 * row + 5 * place) % len(WORDS)] for place in range(1 + 3 * row % 7)]
            target = [WORDS[(7 * row + place) % len(WORDS)] for place in range(1 + 5 * row % 4)]
            lines.write(json.dumps({names[0]: " ".join(source), names[1]: " ".join(target)}) + "\n")
    return file


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture(scope="module")
def folders(pairs, tmp_path_factory):
    """Of each family, a model of transformers with random weights, and a tokenizer."""
    changes = {"train_file": [str(pairs)], "validation_fraction": 0, "max_source_length": 48, "max_target_length": 32}
    changes |= {"tokenizer": "characters", "vocab_size": 96}
    tokenizer = seq2seq.build(load("seq2seq_small_cpu", changes))[0].tokenizer
    found = {}
    for name, (model_type, shape, start) in FAMILIES.items():
        ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
        config = AutoConfig.for_model(
            model_type, **shape, **ids, vocab_size=60, decoder_start_token_id=ids[f"{start}_token_id"]
        )
        torch.manual_seed(3)
        model = AutoModelForSeq2SeqLM.from_config(config)
        if name == "bart":
            model.final_logits_bias.normal_()
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def flags(name: str, folders, pairs, cut: int | str, *, steps: int = STEPS, dtype: str = "float64") -> str:
    return (
        f" --train_file {pairs} --validation_fraction 0 --model_name_or_path {folders[name]} --max_source_length 48 "
        f"--max_target_length 32 --label_smoothing {SMOOTHING} --global_batch_size {NUM} --learning_rate_batch_size {NUM} "
        f"--per_device_train_batch_size {cut} --dtype {dtype} --dropout 0 --max_grad_norm none --max_train_steps {steps} "
        f"--learning_rate {RATE} --lr_scheduler_type constant --warmup_ratio none --num_warmup_steps 0 --weight_decay 0"
        f"{SEQ2SEQ_FROM_FOLDER}"
    )


@pytest.fixture(scope="module")
def truths(folders, pairs):
    """Losses and parameters of 3 steps of transformers and torch alone: a sample at a time, the model's own logits."""
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    found, recipe = {}, load("seq2seq_small_cpu")
    for name, folder in folders.items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64).eval()
        betas = recipe.adam_beta1, recipe.adam_beta2
        optimizer = torch.optim.AdamW(model.parameters(), RATE, betas, recipe.adam_epsilon, weight_decay=0)
        samples = [
            (tokenizer(row["source"], return_tensors="pt"), tokenizer(text_target=row["target"], return_tensors="pt"))
            for row in rows
        ]
        num_targets, losses = sum(target["input_ids"].numel() for _, target in samples), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            total = 0.0
            for source, target in samples:
                labels = target["input_ids"]
                mask = source["attention_mask"]
                logits = model(input_ids=source["input_ids"], attention_mask=mask, labels=labels).logits[0]
                loss = F.cross_entropy(logits, labels[0], reduction="sum", label_smoothing=SMOOTHING) / num_targets
                loss.backward()
                total += loss.item()
            losses.append(total)
            optimizer.step()
        found[name] = losses, dict(model.named_parameters(remove_duplicate=False))
    return found


def check(folder: Path, truth, bound: float) -> None:
    losses, true = truth
    assert [line["loss"] for line in metrics(folder)] == pytest.approx(losses, rel=max(1e-10, bound / 10))
    saved = read(checkpoints(folder)[-1], "model")  # by names without what all of them begin with
    named = {key: tensor for name, tensor in true.items() for key in (name, name.removeprefix("model."))}
    assert named.keys() >= saved.keys() - {"final_logits_bias"}
    pairs = [(tensor, named[name]) for name, tensor in saved.items() if name in named]
    ours, theirs = (torch.cat([pair[place].flatten().double() for pair in pairs]) for place in (0, 1))
    assert relative(ours, theirs) < bound


CUTS = [(name, cut) for name in FAMILIES for cut in (NUM, 8, 5, 4, 2, 1)]


@pytest.mark.parametrize(("name", "cut"), keep(CUTS, [(name, 4) for name in FAMILIES]))
def test_every_cut_is_the_step_of_single_samples(train, folders, pairs, truths, name, cut):
    check(train(name, flags(name, folders, pairs, cut), program="finetune_seq2seq"), truths[name], 1e-10)


def test_single_precision(train, folders, pairs, truths):
    """Adam divides by the root of the second moment: where that is small, roundings of a gradient weigh much."""
    check(train("t5", flags("t5", folders, pairs, 4, dtype="float32"), program="finetune_seq2seq"), truths["t5"], 1e-4)


def test_another_smoothing_is_another_step(train, folders, pairs, truths):
    """The control of the oracle."""
    more = flags("bart", folders, pairs, 4).replace(f"--label_smoothing {SMOOTHING}", "--label_smoothing 0.11")
    with pytest.raises(AssertionError):
        check(train("bart", more, program="finetune_seq2seq"), truths["bart"], 1e-5)


def noisy(name: str, folders, pairs, cut: int, steps: int = STEPS) -> str:
    return flags(name, folders, pairs, cut, steps=steps).replace("--dropout 0", "--dropout 0.2")


@pytest.mark.parametrize("name", keep(FAMILIES, ["bart"]))
def test_noise_is_that_of_the_sample(train, folders, pairs, truths, name):
    """However the step is cut, also where layers are computed again; and it is there."""
    whole = parameters(train("whole", noisy(name, folders, pairs, NUM), program="finetune_seq2seq"))
    cut = parameters(train("cut", noisy(name, folders, pairs, 3), program="finetune_seq2seq"))
    more = noisy(name, folders, pairs, 4) + " --gradient_checkpointing"
    again = parameters(train("again", more, program="finetune_seq2seq"))
    assert relative(cut, whole) < 1e-10
    assert relative(again, whole) < 1e-10
    with pytest.raises(AssertionError):
        check(train("noisy", noisy(name, folders, pairs, 3), program="finetune_seq2seq"), truths[name], 1e-4)


ROUNDED = 2**-20
"""Relative error of a step of T5 by 3 processes: its norms are computed in float32, so that a gradient that is multiplied by 3,
and divided by it, is rounded there."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("num_processes", "families"), [(2, ["mbart"]), thorough(2, [*FAMILIES]), thorough(3, [*FAMILIES])]
)
def test_processes_take_the_same_step(train_on, train, folders, pairs, truths, num_processes, families):
    """Also with exact sums; and resumed from one process on several, with dropout and adapters."""
    lora, program = " --lora_rank 2 --lora_alpha 4 --lora_dropout 0.1", "finetune_seq2seq"
    exact = flags("bart", folders, pairs, 3, dtype="float32")
    others = {
        "parted": noisy("mbart", folders, pairs, 3, steps=4) + lora,
        "exact": exact.replace("--per_device_train_batch_size 3", "--reproducible 3"),
    }
    alone = {name: train(f"alone_{name}", more, program=program) for name, more in others.items()}
    train(f"{program}/parted", f"{others['parted']} --stop_after_step 2", program=program)
    runs = {f"{program}/{name}": flags(name, folders, pairs, 3) for name in families}
    runs |= {f"{program}/{name}": more for name, more in others.items()}
    runs[f"{program}/parted"] += " --resume_from_checkpoint latest"
    folder = train_on(num_processes, runs)
    for name in families:
        is_rounded = num_processes == 3 and name.endswith("t5")
        check(folder / program / name, truths[name], ROUNDED if is_rounded else 1e-10)
    for name, other in alone.items():
        bound = 0 if name == "exact" else 1e-10
        assert relative(parameters(folder / program / name), parameters(other)) <= bound, name


@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["", " --lora_rank 2 --lora_alpha 4", " --freeze encoder"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_rest_of_an_epoch_and_a_process_without_samples(train_on, train, folders, pairs, name, way):
    """Steps of 5, 5 and 3 samples, and of 2 on 3 processes; with adapters, with a part frozen; resumed on more processes."""
    program = "finetune_seq2seq"

    def write(batch: int, cut: int) -> str:
        more = flags(name, folders, pairs, cut).replace(f"batch_size {NUM}", f"batch_size {batch}")
        return f"{more} --epoch_end keep{way}"

    whole, least = (train(f"of_{batch}", write(batch, batch), program=program) for batch in (5, 2))
    assert [line["samples"] for line in metrics(whole)] == [5, 5, 3]
    saving = f"{write(5, 2)} --checkpointing_steps 1"
    train(f"{program}/resumed", f"{saving} --stop_after_step 1", program=program)
    runs = {"processes": write(5, 1), "idle": write(2, 1), "resumed": f"{saving} --resume_from_checkpoint latest"}
    folder = train_on(3, {f"{program}/{key}": more for key, more in runs.items()}) / program
    bound = ROUNDED if name.endswith("t5") else 1e-12
    for key, truth in (("processes", whole), ("resumed", whole), ("idle", least)):
        losses = [[line["loss"] for line in metrics(path)] for path in (folder / key, truth)]
        assert losses[0] == pytest.approx(losses[1], rel=10 * bound)
        assert relative(parameters(folder / key), parameters(truth)) < bound, key
    folder = train_on(2, {f"{program}/sharded": write(5, 2)}, "fsdp2_2xcpu") / program
    assert relative(parameters(folder / "sharded"), parameters(whole)) < 1e-12


@pytest.mark.rooms
@pytest.mark.distributed
@pytest.mark.thorough
def test_processes_that_share_the_weights_take_the_same_step(train_on, train, folders, pairs, truths):
    """FSDP2: also with dropout, and targets are generated together."""
    drawn = " --dropout 0.1 --dtype float64 --per_device_train_batch_size 3 --label_smoothing 0.1"
    alone = train("alone", drawn, program="finetune_seq2seq")
    runs = {f"finetune_seq2seq/{name}": flags(name, folders, pairs, 3) for name in FAMILIES}
    folder = train_on(2, runs | {"finetune_seq2seq/drawn": drawn}, "fsdp2_2xcpu") / "finetune_seq2seq"
    for name in FAMILIES:
        check(folder / name, truths[name], 1e-10)
    assert relative(parameters(folder / "drawn"), parameters(alone)) < 1e-10
    generated = [(path / "generations.jsonl").read_text(encoding="utf-8") for path in (alone, folder / "drawn")]
    assert generated[0] == generated[1]


@pytest.mark.rooms
def test_what_is_saved_generates_as_it_was_evaluated(train, pairs):
    """Adapters are merged; the folder's own generate writes what the last evaluation has."""
    more = (
        f" --train_file {pairs} --validation_fraction 0.4 --max_train_steps 4 --num_train_samples none "
        "--num_validation_samples none --lora_rank 2 --lora_alpha 4 --learning_rate 0.01 --generation_metrics exact_match"
    )
    folder = train("saved", more, program="finetune_seq2seq")
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    lines = [json.loads(line) for line in (folder / "generations.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 4
    for line in lines:
        tokens = model.generate(**tokenizer(line["source"], return_tensors="pt"), max_new_tokens=8)
        assert tokenizer.decode(tokens[0], skip_special_tokens=True).strip() == line["generated"]
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    assert {(line["source"], line["expected"]) for line in lines} <= {(row["source"], row["target"]) for row in rows}
    assert not (folder / "adapter_config.json").exists()


@pytest.mark.rooms
def test_evaluations_by_kind_and_the_best_model(train):
    more = " --eval_steps 2 --max_train_steps 6 --load_best_model_at_end --metric_for_best_model word_error_rate "
    more += "--generation_metrics exact_match bleu chrf word_error_rate rouge"
    folder = train("best", more, program="finetune_seq2seq")
    lines = evaluations(folder)
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    for name in ("loss", "perplexity", "exact_match", "bleu", "chrf", "word_error_rate", "rouge1", "rouge2", "rougeL"):
        for kind in ("", "dates/", "numbers/"):
            assert f"eval_{kind}{name}" in lines[-1]
    best = min(lines, key=lambda line: line["eval_word_error_rate"])
    assert json.loads((folder / "all_results.json").read_text())["best_step"] == best["step"]
    assert AutoModelForSeq2SeqLM.from_pretrained(folder / "best").config.d_model == 16
    other = train("other", f"{more} --per_device_eval_batch_size 1", program="finetune_seq2seq")
    assert [line["eval_loss"] for line in evaluations(other)] == pytest.approx(
        [line["eval_loss"] for line in lines], rel=1e-4
    )


def test_a_gradient_that_is_not_finite_is_refused_before_the_first_step(train, folders, pairs, tmp_path):
    """LED masks padding with a number of float32, which float64 makes infinite."""
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 60, "attention_window": [8, 8]}
    sizes |= {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "init_std": 0.1}
    tokenizer = AutoTokenizer.from_pretrained(folders["bart"])
    config = AutoConfig.for_model("led", **sizes, decoder_start_token_id=tokenizer.eos_token_id)
    torch.manual_seed(3)
    for part in (AutoModelForSeq2SeqLM.from_config(config), tokenizer):
        part.save_pretrained(tmp_path / "led")
    more = {dtype: flags("led", {"led": tmp_path / "led"}, pairs, 4, dtype=dtype) for dtype in ("float32", "float64")}
    assert all(line["loss"] > 0 for line in metrics(train("led", more["float32"], program="finetune_seq2seq")))
    with pytest.raises(
        UsageError, match="dtype is float64, but the gradient of LEDForConditionalGeneration is not finite"
    ):
        train("refused", more["float64"], program="finetune_seq2seq")
