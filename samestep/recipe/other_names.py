"""Answers flags of other training programs, Hugging Face's above all, by what they are called, or decided by, here.

And our own flags of earlier versions.
"""

import os
import sys
from collections.abc import Container, Sequence

_SAME = {
    "adam_beta1": "adam_b1 beta1",
    "adam_beta2": "beta2",
    "attn_implementation": "attention flash_attention",
    "checkpointing_steps": "checkpointing save_every save_interval save_steps save_strategy",
    "checkpoints_total_limit": "save_total_limit",
    "dataloader_num_workers": "num_workers",
    "dataset_config_name": "config_name",
    "dataset_name train_file train_dir": "dataset dataset_path",
    "eval_steps": "eval_every eval_interval",
    "generation_length": "max_new_tokens",
    "global_batch_size per_device_train_batch_size": "batch batch_size train_batch_size",
    "gradient_accumulation_steps": "accum_iter grad_accum grad_accum_steps",
    "label_smoothing": "label_smoothing_factor",
    "learning_rate": "lr",
    "logging_steps": "log_every",
    "lora_rank": "lora lora_r peft use_lora use_peft",
    "lora_targets": "lora_target target_modules",
    "lr_scheduler_type": "learning_rate_scheduler lr_scheduler scheduler",
    "max_grad_norm": "clip_grad clip_grad_norm gradient_clipping",
    "max_position_embeddings n_positions": "max_position",
    "max_seq_length block_size seq_len": (
        "block_size context_length cutoff_len max_len max_length max_seq_len "
        "max_seq_length max_source_length model_max_length seq_len seq_length"
    ),
    "max_train_steps": "max_iters max_steps num_steps",
    "mlm_probability": "mlm_prob",
    "model_name_or_path": "model model_id model_name model_path",
    "num_hidden_layers n_layer": "num_layers",
    "num_train_epochs": "epochs max_epochs num_epochs",
    "num_warmup_steps": "warmup_steps",
    "num_warmup_steps warmup_ratio": "warmup",
    "on": "hardware",
    "optimizer": "optim",
    "output_dir": "out_dir output",
    "overwrite_output_dir": "overwrite",
    "per_device_eval_batch_size": "eval_batch_size",
    "per_device_train_batch_size": "device_batch_size per_gpu_train_batch_size",
    "preference_beta": "beta",
    "preprocessing_num_workers": "num_proc",
    "recipe": "config",
    "report_to": "log_with tracker wandb with_tracking",
    "resume_from_checkpoint": "resume",
    "resume_from_checkpoint model_name_or_path": "checkpoint ckpt",
    "sgd_momentum muon_momentum": "momentum",
    "tokenizer_name": "tokenizer_path",
    "torch_compile": "compile",
    "train_dir train_file": "train_data_dir",
    "train_dir train_file dataset_name": "data_dir",
    "train_file train_dir dataset_name": "data data_path train_data",
    "train_on": "assistant_only_loss completion_only_loss",
    "validation_file": "test_file",
    "validation_file validation_dir": "eval_file",
    "validation_fraction": "validation_split_percentage",
    "weight_decay": "wd",
}
"""Flags here -> flags of other programs that mean the same, and are spelt too differently to be found as the nearest one."""
SYNONYMS = {name: flags for flags, names in _SAME.items() for name in names.split()}

_PRECISION = "precision is the launch file's: accelerate launch --mixed_precision bf16"
_REASONS = {
    _PRECISION: "amp bf16 fp16 half mixed_precision precision torch_dtype",
    "launch files go to accelerate launch --config_file, recipes to --recipe": "config_file",
    "the launch decides it: accelerate launch --cpu, or --config_file accelerate_configs/cpu.yaml": (
        "cpu cuda device no_cuda use_cpu"
    ),
    "the launch decides it: accelerate launch --config_file FILE, or --num_processes N": (
        "ddp devices distributed gpu gpus local_rank n_gpu nproc_per_node num_gpus num_machines num_processes world_size"
    ),
    "DeepSpeed would change the step; weights are shared by accelerate_configs/fsdp2_8xa100.yaml (FSDP2)": (
        "deepspeed deepspeed_config zero_stage"
    ),
    "every run trains, and evaluates what is held out (--eval_steps, --validation_fraction): leave it out": (
        "do_eval do_predict do_train"
    ),
    "--eval_steps N evaluates every N steps; without it, at the start and the end": "eval_strategy evaluation_strategy",
    "the launch file decides it: accelerate launch --config_file accelerate_configs/fsdp2_8xa100.yaml (FSDP2)": (
        "fsdp fsdp_config"
    ),
    (
        "all weights are trained, in float32, but by finetune_causal_lm.py: adapters by --lora_rank, over a base "
        "in 4 bits by --base_quantization nf4"
    ): "load_in_4bit load_in_8bit lora lora_r peft qlora use_lora use_peft",
    "this task is trained by AdamW; pretraining and images have --optimizer": "optim optimizer",
    "only texts are streamed (docs/streaming.md): leave it out": "streaming",
    "code of others is never run: leave it out": "trust_remote_code",
}
"""Place where something is decided here, or reason why it is not -> flags of other programs that decide it."""
ELSEWHERE = {name: reason for reason, names in _REASONS.items() for name in names.split()}


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
