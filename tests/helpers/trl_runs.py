"""Tiny trainings by TRL's trainers, plain or exact; `main` runs them on the processes that forked.Server starts."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, disable_progress_bars
from run_own_trainer import Gradients
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from samestep import exact
from samestep.errors import UsageError

WORDS = [f"w{number}" for number in range(20)]
OPTIONS = {
    "num_train_epochs": 1,
    "learning_rate": 0.1,
    "optim": "sgd",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.chat_template = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
    return made


def make_model(
    folder: Path, is_reward: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0
) -> torch.nn.Module:
    """Make a model of a folder, from which trainers load their reference."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=None, num_labels=1)
    made = LlamaForSequenceClassification if is_reward else LlamaForCausalLM
    with PartialState(cpu=True).main_process_first():
        if not folder.exists():
            made(config).to(dtype).save_pretrained(folder)
    return made.from_pretrained(folder, dtype=dtype)


def text(number: int, kind: int) -> str:
    length = 2 + (5 * number + 3 * kind) % 9
    return " ".join(WORDS[(7 * number + 3 * kind + place * place) % len(WORDS)] for place in range(length))


def draw(kind: str, num_samples: int) -> Dataset:
    """Draw texts, answers, chats, pairs, triples or judged answers, all of different lengths."""
    rows: Mapping[str, Any] = {
        "texts": lambda n: {"text": text(n, 0)},
        "answers": lambda n: {"prompt": text(n, 0) + " ", "completion": text(n, 1)},
        "pairs": lambda n: {"prompt": text(n, 0) + " ", "chosen": text(n, 1), "rejected": text(n, 2)},
        "chats": lambda n: {
            "messages": [{"role": "user", "content": text(n, 0)}, {"role": "assistant", "content": text(n, 1)}]
        },
        "triples": lambda n: {
            "prompt": text(n, 0) + " ",
            "chosen": text(n, 1),
            "rejected": text(n, 2),
            "reference": text(n, 3),
        },
        "judged": lambda n: {"prompt": text(n, 0) + " ", "completion": text(n, 1), "label": n % 3 > 0},
    }
    return Dataset.from_list([rows[kind](number) for number in range(num_samples)])


def make_cases() -> dict[str, tuple[type, type, str, dict]]:
    """Name -> trainer, its arguments' class, kind of data, more arguments."""
    import trl
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    sft, dpo = (trl.SFTTrainer, trl.SFTConfig), (trl.DPOTrainer, trl.DPOConfig)
    kto, cpo = (trl.KTOTrainer, trl.KTOConfig), (CPOTrainer, CPOConfig)
    return {
        "sft": (*sft, "answers", {}),
        "sft of texts": (*sft, "texts", {}),
        "sft without padding": (*sft, "texts", {"padding_free": True, "max_length": None}),
        "sft packed": (*sft, "texts", {"packing": True, "max_length": 16}),
        "dft": (*sft, "answers", {"loss_type": "dft"}),
        "dpo": (*dpo, "pairs", {}),
        "ipo": (*dpo, "pairs", {"loss_type": "ipo"}),
        "reward": (trl.RewardTrainer, trl.RewardConfig, "pairs", {}),
        "apo": (*kto, "judged", {"loss_type": "apo_zero_unpaired"}),
        "simpo": (*cpo, "pairs", {"loss_type": "simpo", "cpo_alpha": 0.0}),
        "kto": (*kto, "judged", {}),
        "cpo": (*cpo, "pairs", {}),
        "orpo": (ORPOTrainer, ORPOConfig, "pairs", {}),
        "dpo and sft": (*dpo, "pairs", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}),
        "tpo": (TPOTrainer, TPOConfig, "triples", {}),
        "gkd": (GKDTrainer, GKDConfig, "chats", {"lmbda": 0.0}),
        "aot": (*dpo, "pairs", {"loss_type": "aot"}),
    }


REFUSED = ("kto", "aot")
"""Cases whose loss compares the samples of a batch."""


def make_trainer(name: str, folder: Path, b: int, k: int, is_exact: bool = True, num_samples: int = 11, **more: Any):
    """Make a trainer that keeps its gradients: trainer.gradients.all."""
    trainer_class, config_class, kind, options = make_cases()[name]
    options = OPTIONS | options | more
    dtype, model = options.pop("dtype", torch.float64), options.pop("model", None)
    given = {key: options.pop(key) for key in ("peft_config",) if key in options}
    arguments = config_class(
        output_dir=str(folder / "run"), per_device_train_batch_size=b, gradient_accumulation_steps=k, **options
    )
    data, gradients = draw(kind, num_samples), Gradients()
    if trainer_class.__name__ == "GKDTrainer":
        given["teacher_model"] = make_model(folder / f"teacher-{dtype}", dtype=dtype, seed=1)
        arguments.remove_unused_columns = False
    model = model or make_model(folder / f"model-{dtype}", name == "reward", dtype)
    torch.manual_seed(0)  # adapters are drawn when a trainer is made, and not all of TRL's seed that
    trainer = (exact(trainer_class) if is_exact else trainer_class)(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        processing_class=make_tokenizer(),
        callbacks=[gradients],
        **given,
    )
    trainer.gradients = gradients
    return trainer


ON_PROCESSES = (("sft", 9), ("dpo", 7), ("orpo", 7))
"""Cases, and samples: of 3 processes two have none in the last step, or all have one."""


def main(folder: str) -> None:
    disable_progress_bars()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    results = {}
    for name, num_samples in ON_PROCESSES:
        trainer = make_trainer(name, Path(folder) / name, 2, 6 // (2 * size), num_samples=num_samples)
        trainer.train()
        results[name] = torch.stack(trainer.gradients.all)
    sharded = {
        "fsdp": "full_shard",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }
    for name in ("sft", "aot"):
        more = sharded if size > 1 else {}
        trainer = make_trainer(name, Path(folder) / f"{name}-sharded", 2, 6 // (2 * size), num_samples=7, **more)
        try:
            trainer.train()
            results[f"{name} sharded"] = torch.stack(trainer.gradients.all)
        except UsageError as error:
            results[f"{name} sharded, refused"] = torch.tensor(float("is not that of its samples" in str(error)))
    torch.save(results, Path(folder) / f"{rank}.pt")
    os._exit(0)
