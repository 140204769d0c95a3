"""Five tiny models, built from configs (nothing is downloaded), and 77 seeded samples of ragged length for each.

float64, no dropout. With a global batch of 32 the steps have 32, 32 and 13 samples.
"""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence

MODELS = ("gpt2", "bert_mlm", "bert_pretraining", "bert_classifier", "resnet")
NUM_SAMPLES, LENGTHS, VOCABULARY, CLASSES, MASK = 77, (4, 64), 64, 3, 2


def flags() -> tuple[str, int, int]:
    """Parse the flags: model, samples of a micro-batch, micro-batches of a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    arguments = parser.parse_args()
    return arguments.model, arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps


def task(name: str) -> tuple[transformers.PreTrainedModel, list[dict]]:
    """Make a model and its samples, the same ones in every program and process."""
    torch.manual_seed(0)
    return build(name).double().train(), samples(name)


def build(name: str) -> transformers.PreTrainedModel:
    # Weights larger than is usual: then the gradients of different samples differ from the first step on.
    shared = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "attn_implementation": "eager"}
    if name == "gpt2":
        sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, **shared, use_cache=False))
    if name == "resnet":
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
        return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, num_labels=CLASSES))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **no_dropout, **shared, max_position_embeddings=64, num_labels=CLASSES)
    heads = {"bert_mlm": "ForMaskedLM", "bert_pretraining": "ForPreTraining"}
    return getattr(transformers, f"Bert{heads.get(name, 'ForSequenceClassification')}")(config)


def samples(name: str) -> list[dict]:
    random = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    def sample() -> dict:
        if name == "resnet":
            pixels = torch.randn(3, 16, 16, generator=random, dtype=torch.float64)
            return {"pixel_values": pixels, "labels": draw(0, CLASSES)}
        tokens = draw(3, VOCABULARY, int(draw(LENGTHS[0], LENGTHS[1] + 1)))
        if name == "gpt2":
            return {"input_ids": tokens, "labels": tokens}
        if name == "bert_classifier":
            return {"input_ids": tokens, "labels": draw(0, CLASSES)}
        is_masked = torch.rand(len(tokens), generator=random) < 0.15
        is_masked[draw(0, len(tokens))] = True
        masked = {"input_ids": tokens.where(~is_masked, MASK), "labels": tokens.where(is_masked, -100)}
        return masked | ({"next_sentence_label": draw(0, 2)} if name == "bert_pretraining" else {})

    return [sample() for _ in range(NUM_SAMPLES)]


def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
    """Pad tokens with 0, labels of tokens with -100, and say in `attention_mask` which tokens are no padding."""
    batch = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if values[0].ndim == 1:
            batch[name] = pad_sequence(values, batch_first=True, padding_value=-100 if name == "labels" else 0)
        else:
            batch[name] = torch.stack(values)
    if "input_ids" in batch:
        batch["attention_mask"] = pad_sequence([torch.ones_like(s["input_ids"]) for s in samples], batch_first=True)
    return batch


def targets(name: str, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the labels that each term of the loss predicts; -100 is left out."""
    labels = batch["labels"][:, 1:] if name == "gpt2" else batch["labels"]
    return [labels, batch["next_sentence_label"]] if name == "bert_pretraining" else [labels]


def counts(name: str, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Count the targets of each term, int64 [terms]."""
    return torch.stack([(labels != -100).sum() for labels in targets(name, batch)])


def sums(name: str, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum the losses of each term, float64 [terms]."""
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "next_sentence_label")}
    output = model(**inputs)
    if name == "bert_pretraining":
        logits = [output.prediction_logits, output.seq_relationship_logits]
    else:
        logits = [output.logits[:, :-1] if name == "gpt2" else output.logits]
    terms = zip(logits, targets(name, batch), strict=True)
    return torch.stack([F.cross_entropy(x.flatten(0, -2), y.flatten(), reduction="sum") for x, y in terms])
