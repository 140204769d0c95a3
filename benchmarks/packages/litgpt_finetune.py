"""LitGPT's `litgpt finetune_full`: its own loop, `fit`, with a tiny model, and samples as its data modules give them.

The checkpoint's tokenizer is made here. `fit` is called as `main` of that module does.
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import lightning
import torch
from litgpt import GPT, Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data.base import get_sft_collate_fn
from litgpt.finetune.full import fit
from setup import RATE, SIZES, arguments, texts, tokenizer
from torch.utils.data import DataLoader

flags, words = arguments(), tokenizer()
b, k = flags["per_device_train_batch_size"], flags["gradient_accumulation_steps"]
checkpoint = Path(tempfile.mkdtemp(prefix="packages-litgpt-"))
words.save_pretrained(checkpoint)
(checkpoint / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))

fabric = lightning.Fabric(devices=1, accelerator="cpu")
config = Config(block_size=64, vocab_size=SIZES["vocab_size"], n_layer=2, n_head=2, n_embd=32, padded_vocab_size=32)
model = fabric.setup_module(GPT(config))
optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=RATE))
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)
data = []
for text in texts(1):
    ids = torch.tensor(words(text)["input_ids"])
    counts = {"raw": len(ids), "raw_plus_prompt_template": len(ids)}
    data.append({"input_ids": ids, "labels": ids.clone(), "token_counts": counts})
loader, validation = (DataLoader(part, batch_size=b, collate_fn=get_sft_collate_fn()) for part in (data, data[:4]))
fit(
    fabric=fabric,
    state={"model": model, "optimizer": optimizer, "scheduler": scheduler, "iter_num": 0, "step_count": 0},
    train_dataloader=fabric.setup_dataloaders(loader),
    val_dataloader=validation,
    devices=1,
    resume=False,
    checkpoint_dir=checkpoint,
    out_dir=checkpoint,
    train=TrainArgs(global_batch_size=b * k, micro_batch_size=b, epochs=1, log_interval=1000, save_interval=None),
    eval=EvalArgs(interval=1000, max_new_tokens=2, max_iters=1),
    data=SimpleNamespace(),
)
