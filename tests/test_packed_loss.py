"""`PackedLoss`: a batch without its padding has the gradient of the padded one, and evaluation is as it was."""

import pytest
import torch
from common import fresh_accelerator
from run_own_trainer import NUM_SAMPLES, SIZES, Gradients, bert, collate, draw, gpt2, make_arguments
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from samestep import ExactTrainer, PackedLoss
from samestep.errors import UsageError

LENGTH = 16


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, max_position_embeddings=LENGTH))


def moe():
    more = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **more, head_dim=8))


@pytest.fixture
def train(tmp_path):
    def run(build, b: int, k: int, is_packed: bool, **more) -> tuple[list[torch.Tensor], ExactTrainer]:
        fresh_accelerator()
        torch.manual_seed(0)
        model, gradients = build(), Gradients()
        arguments = make_arguments(
            tmp_path, per_device_train_batch_size=b, gradient_accumulation_steps=k, learning_rate=0.0, **more
        )
        data = [draw("text", number) for number in range(NUM_SAMPLES)]
        trainer = ExactTrainer(
            model,
            arguments,
            data_collator=collate,
            train_dataset=data,
            eval_dataset=data,
            callbacks=[gradients],
            loss=PackedLoss(model) if is_packed else None,
        )
        trainer.train()
        return gradients.all, trainer

    yield run
    fresh_accelerator()


@pytest.mark.parametrize("build", [gpt2, llama, moe])
def test_the_gradient_is_that_of_the_padded_batch(train, build):
    """Cut as 4 x 1, 1 x 4, and as 2 x 2 with layers that are computed again in the backward; the last step has 3 samples."""
    padded, _ = train(build, 4, 1, False)
    for b, k, recomputes in ((4, 1, False), (1, 4, False), (2, 2, True)):
        packed, trainer = train(build, b, k, True, gradient_checkpointing=recomputes)
        for ours, true in zip(packed, padded, strict=True):
            assert torch.dist(ours, true) <= 1e-6 * true.norm()
    assert trainer.model.is_gradient_checkpointing
    trainer.train()  # turns recomputation on again
    for ours, true in zip(packed[len(padded) :], padded, strict=True):
        assert torch.dist(ours, true) <= 1e-6 * true.norm()


def test_no_padding_is_computed(train):
    """Each forward has the tokens of its samples, and fewer than seven besides."""
    shapes = []
    counts = [len(draw("text", number)["input_ids"]) for number in range(NUM_SAMPLES)]

    def build():
        model = llama()
        model.model.layers[0].register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
        return model

    train(build, 4, 1, True)
    for first, shape in zip(range(0, NUM_SAMPLES, 4), shapes[-3:], strict=True):  # those before are of the probe
        assert shape[0] == 1
        assert 0 < shape[1] - sum(counts[first : first + 4]) <= 6


def test_evaluation_and_generation_are_as_without(train):
    prompt = torch.tensor([[3, 4, 5], [0, 6, 7]])
    results = []
    for is_packed in (False, True):
        _, trainer = train(llama, 4, 1, is_packed)
        output = trainer.predict(trainer.eval_dataset)
        words = trainer.model.generate(prompt, attention_mask=(prompt != 0).long(), max_new_tokens=4, do_sample=False)
        results.append((output.metrics["test_loss"], torch.from_numpy(output.predictions), words))
    (loss, logits, words), (packed_loss, packed_logits, packed_words) = results
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(packed_logits, logits, atol=1e-5)
    assert packed_words.equal(words)


def test_padding_in_front_is_left_out_too():
    torch.manual_seed(0)
    model = llama()
    packed = PackedLoss(model)
    batch = collate([draw("text", number) for number in range(3)])
    del batch["next_sentence_label"]
    turned = {name: torch.zeros_like(rows) for name, rows in batch.items()}
    turned["labels"] -= 100
    for row, length in enumerate(batch["attention_mask"].sum(1)):
        for name in batch:
            turned[name][row, -length:] = batch[name][row, :length]
    assert packed.targets(turned) == packed.targets(batch)
    (loss, count), (turned_loss, turned_count) = packed(model, batch), packed(model, turned)
    assert turned_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert turned_count.equal(count)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(UsageError, match=r"is of causal language models, but BertForSequenceClassification is none"):
        PackedLoss(bert("BertForSequenceClassification"))
    mamba = MambaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UsageError, match=r"MambaForCausalLM .*leave it padded"):
        PackedLoss(MambaForCausalLM(mamba))
    model = llama()
    packed = PackedLoss(model)
    batch = collate([draw("text", number) for number in range(3)])
    with pytest.raises(UsageError, match=r"batch has next_sentence_label: PackedLoss packs input_ids"):
        packed(model, batch)
    del batch["next_sentence_label"]
    with pytest.raises(UsageError, match=r"batch has input_ids, attention_mask, must have labels, too"):
        packed(model, {name: batch[name] for name in ("input_ids", "attention_mask")})
    with pytest.raises(UsageError, match=r"the model is not the one that PackedLoss\(model\) was made of"):
        packed(llama(), batch)
    batch["labels"][:, -1] = 1
    with pytest.raises(UsageError, match=r"2 labels are at places where attention_mask is 0: set them to -100"):
        packed(model, batch)
