"""Exact: a plain Accelerate loop trains a LoRA adapter of peft on the summed losses of ragged continuations.
When gradients are in step, they are brought from sum / k, averaged over processes, to the mean over all tokens."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, PAD = 48, 0


def melodies(n):
    """A theme and its repetition some tones higher: only the repetition is learned."""
    generator = torch.Generator().manual_seed(77)
    for length in torch.randint(1, 9, (n,), generator=generator).tolist():
        theme = torch.randint(1, 40, (length,), generator=generator)
        higher = theme + int(torch.randint(1, 8, (), generator=generator))
        yield torch.cat([theme, higher]), torch.cat([torch.full_like(theme, -100), higher])


def collate(pairs):
    ids, labels = zip(*pairs, strict=True)
    ids = pad_sequence(ids, batch_first=True, padding_value=PAD)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def adapted():
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=PAD,
    )
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "k_proj", "o_proj"], use_rslora=True)
    return get_peft_model(LlamaForCausalLM(config), lora).double()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    k = args.gradient_accumulation_steps
    accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
    set_seed(4)
    model = adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.02)
    loader = DataLoader(list(melodies(80)), batch_size=args.per_device_train_batch_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for epoch in range(2):
        tokens, total_loss = 0, 0.0
        for batch in loader:
            with accelerator.accumulate(model):
                labels = batch.pop("labels")[:, 1:]
                logits = model(**batch, use_cache=False).logits[:, :-1]
                loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="sum")
                accelerator.backward(loss)
                tokens += (labels != -100).sum()
                total_loss += loss.detach()
                if accelerator.sync_gradients:
                    everywhere = accelerator.reduce(tokens, reduction="sum")
                    for p in trained:
                        p.grad.mul_(k * accelerator.num_processes / everywhere)
                    tokens = 0
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {accelerator.reduce(total_loss, reduction='sum'):.4f}")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
