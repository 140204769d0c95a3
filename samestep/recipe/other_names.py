"""Answers flags of other training programs, Hugging Face's above all, by what they are called, or decided by, here.

And our own flags of earlier versions.
"""

import os
import sys
from collections.abc import Container, Sequence

_LENGTH = "max_seq_length block_size seq_len"
_CHECKPOINTS = "checkpointing_steps"

SYNONYMS = {
    "accum_iter": "gradient_accumulation_steps",
    "adam_b1": "adam_beta1",
    "assistant_only_loss": "train_on",
    "attention": "attn_implementation",
    "batch": "global_batch_size per_device_train_batch_size",
    "batch_size": "global_batch_size per_device_train_batch_size",
    "beta": "preference_beta",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "block_size": _LENGTH,
    "checkpoint": "resume_from_checkpoint model_name_or_path",
    "checkpointing": _CHECKPOINTS,
    "ckpt": "resume_from_checkpoint model_name_or_path",
    "clip_grad": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "compile": "torch_compile",
    "completion_only_loss": "train_on",
    "config": "recipe",
    "config_name": "dataset_config_name",
    "context_length": _LENGTH,
    "cutoff_len": _LENGTH,
    "data": "train_file train_dir dataset_name",
    "data_dir": "train_dir train_file dataset_name",
    "data_path": "train_file train_dir dataset_name",
    "dataset": "dataset_name train_file train_dir",
    "dataset_path": "dataset_name train_file train_dir",
    "device_batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "eval_batch_size": "per_device_eval_batch_size",
    "eval_every": "eval_steps",
    "eval_interval": "eval_steps",
    "eval_file": "validation_file validation_dir",
    "flash_attention": "attn_implementation",
    "grad_accum": "gradient_accumulation_steps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "hardware": "on",
    "label_smoothing_factor": "label_smoothing",
    "learning_rate_scheduler": "lr_scheduler_type",
    "log_every": "logging_steps",
    "log_with": "report_to",
    "lora": "lora_rank",
    "lora_r": "lora_rank",
    "lora_target": "lora_targets",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "max_epochs": "num_train_epochs",
    "max_iters": "max_train_steps",
    "max_len": _LENGTH,
    "max_length": _LENGTH,
    "max_new_tokens": "generation_length",
    "max_position": "max_position_embeddings n_positions",
    "max_seq_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_source_length": _LENGTH,
    "max_steps": "max_train_steps",
    "model": "model_name_or_path",
    "model_id": "model_name_or_path",
    "model_max_length": _LENGTH,
    "model_name": "model_name_or_path",
    "model_path": "model_name_or_path",
    "mlm_prob": "mlm_probability",
    "momentum": "sgd_momentum muon_momentum",
    "num_epochs": "num_train_epochs",
    "num_layers": "num_hidden_layers n_layer",
    "num_proc": "preprocessing_num_workers",
    "num_steps": "max_train_steps",
    "num_workers": "dataloader_num_workers",
    "optim": "optimizer",
    "out_dir": "output_dir",
    "output": "output_dir",
    "overwrite": "overwrite_output_dir",
    "peft": "lora_rank",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "resume": "resume_from_checkpoint",
    "save_every": _CHECKPOINTS,
    "save_interval": _CHECKPOINTS,
    "save_steps": _CHECKPOINTS,
    "save_strategy": _CHECKPOINTS,
    "save_total_limit": "checkpoints_total_limit",
    "scheduler": "lr_scheduler_type",
    "seq_len": _LENGTH,
    "seq_length": _LENGTH,
    "target_modules": "lora_targets",
    "test_file": "validation_file",
    "tokenizer_path": "tokenizer_name",
    "tracker": "report_to",
    "train_batch_size": "global_batch_size per_device_train_batch_size",
    "train_data": "train_file train_dir dataset_name",
    "train_data_dir": "train_dir train_file",
    "use_lora": "lora_rank",
    "use_peft": "lora_rank",
    "validation_split_percentage": "validation_fraction",
    "wandb": "report_to",
    "warmup": "num_warmup_steps warmup_ratio",
    "warmup_steps": "num_warmup_steps",
    "wd": "weight_decay",
    "with_tracking": "report_to",
}
"""Flag of another program -> flags that mean the same here, and are spelt too differently to be found as the nearest one."""

_PRECISION = "precision is the launch file's: accelerate launch --mixed_precision bf16"
_PROCESSES = "the launch decides it: accelerate launch --config_file FILE, or --num_processes N"
_CPU = "the launch decides it: accelerate launch --cpu, or --config_file accelerate_configs/cpu.yaml"
_SHARDING = "the launch file decides it: accelerate launch --config_file accelerate_configs/fsdp2_8xa100.yaml (FSDP2)"
_DEEPSPEED = "DeepSpeed would change the step; weights are shared by accelerate_configs/fsdp2_8xa100.yaml (FSDP2)"
_PHASES = "every run trains, and evaluates what is held out (--eval_steps, --validation_fraction): leave it out"
_ALL_WEIGHTS = (
    "all weights are trained, in float32, but by finetune_causal_lm.py: adapters by --lora_rank, over a base in 4 bits by "
    "--base_quantization nf4"
)
_EVALUATIONS = "--eval_steps N evaluates every N steps; without it, at the start and the end"

ELSEWHERE = {
    "amp": _PRECISION,
    "bf16": _PRECISION,
    "config_file": "launch files go to accelerate launch --config_file, recipes to --recipe",
    "cpu": _CPU,
    "cuda": _CPU,
    "ddp": _PROCESSES,
    "deepspeed": _DEEPSPEED,
    "deepspeed_config": _DEEPSPEED,
    "device": _CPU,
    "devices": _PROCESSES,
    "distributed": _PROCESSES,
    "do_eval": _PHASES,
    "do_predict": _PHASES,
    "do_train": _PHASES,
    "eval_strategy": _EVALUATIONS,
    "evaluation_strategy": _EVALUATIONS,
    "fp16": _PRECISION,
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "gpu": _PROCESSES,
    "gpus": _PROCESSES,
    "half": _PRECISION,
    "load_in_4bit": _ALL_WEIGHTS,
    "load_in_8bit": _ALL_WEIGHTS,
    "local_rank": _PROCESSES,
    "lora": _ALL_WEIGHTS,
    "lora_r": _ALL_WEIGHTS,
    "mixed_precision": _PRECISION,
    "n_gpu": _PROCESSES,
    "no_cuda": _CPU,
    "nproc_per_node": _PROCESSES,
    "num_gpus": _PROCESSES,
    "num_machines": _PROCESSES,
    "num_processes": _PROCESSES,
    "optim": "this task is trained by AdamW; pretraining and images have --optimizer",
    "optimizer": "this task is trained by AdamW; pretraining and images have --optimizer",
    "peft": _ALL_WEIGHTS,
    "precision": _PRECISION,
    "qlora": _ALL_WEIGHTS,
    "streaming": "data is read once into a cache on disk, and mapped into memory from there: leave it out",
    "torch_dtype": _PRECISION,
    "trust_remote_code": "code of others is never run: leave it out",
    "use_cpu": _CPU,
    "use_lora": _ALL_WEIGHTS,
    "use_peft": _ALL_WEIGHTS,
    "world_size": _PROCESSES,
    "zero_stage": _DEEPSPEED,
}
"""Flag of another program -> where that is decided here, or why it is not."""


def explain(name: str, flags: Container[str]) -> str | None:
    """Say which of `flags` a name of another program stands for, or where that is decided; None: the name is not known.

    >>> explain("lr", {"learning_rate"}), explain("bf16", {"mixed_precision"}), explain("zzz", {"seed"})
    ('did you mean --learning_rate?', 'did you mean --mixed_precision?', None)
    """
    name = name.replace("-", "_")
    synonyms = SYNONYMS.get(name, "").split()
    if ELSEWHERE.get(name) == _PRECISION:
        synonyms.append("mixed_precision")
    if valid := [f"--{synonym}" for synonym in synonyms if synonym in flags]:
        return f"did you mean {' or '.join(valid)}?"
    return ELSEWHERE.get(name)


OLD_FLAGS = {"on_bad_sample": ("on_bad_row", {"stop": "refuse"})}
"""Flag that will go in 0.2 -> its name today, and values that are called otherwise today."""

_announced: set[str] = set()  # old flags that this process has named: flags are parsed several times


def rename_old_flags(argv: Sequence[str]) -> list[str]:
    """Write flags of `OLD_FLAGS` by their names of today, with a line on stderr for each.

    >>> rename_old_flags(["--on_bad_row", "skip"])
    ['--on_bad_row', 'skip']
    """
    words, values = [], {}
    for word in argv:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in OLD_FLAGS:
            new, values = OLD_FLAGS[name]
            if name not in _announced and os.environ.get("RANK", "0") == "0":
                _announced.add(name)
                print(f"--{name} is --{new} now, and will go in 0.2: write --{new}", file=sys.stderr)
            word = f"--{new}{equals}{values.get(value, value)}"
            values = {} if equals else values
        elif values:
            word, values = values.get(word, word), {}
        words.append(word)
    return words
