"""exact(Trainer) of heads whose loss balances experts: of all tokens of a step, however it is cut."""

import pytest
import torch
import transformers
import trl_runs
from common import fresh_accelerator
from run_expert_term import NUM_SAMPLES, ON_PROCESSES, build, build_words, compute_truth, join, train

from samestep import PackedLoss
from samestep.errors import UsageError
from samestep.training.head_loss import HeadLoss

HEADS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")
MORE_HEADS = (
    *("Qwen2MoeForCausalLM", "OlmoeForCausalLM", "GraniteMoeForCausalLM", "Qwen3NextForCausalLM", "PhimoeForCausalLM"),
    *("JambaForCausalLM", "DeepseekV4ForCausalLM", "MiniMaxForCausalLM", "FlexOlmoForCausalLM"),
)


def distance(found, true):
    return max((torch.dist(a, b) / b.norm()).item() for a, b in zip(found, true, strict=True))


@pytest.mark.parametrize("name", [*HEADS, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE_HEADS)])
def test_every_cut_is_the_step_of_one_large_batch(name, tmp_path):
    """The truth is the model's own loss of 8 and of 3 samples."""
    true = compute_truth(name)
    assert distance(train(name, 2, 4, tmp_path, is_exact=False)[0], true) > 0.05
    for b, k in ((8, 1), (4, 2), (1, 8)):
        found, trainer = train(name, b, k, tmp_path)
        assert distance(found, true) < 2e-6, (b, k)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    own = [build(name)(**join(name, numbers)).loss.item() for numbers in (range(8), range(8, NUM_SAMPLES))]
    assert logged == pytest.approx(own, rel=1e-3)
    whole = build(name).eval()(**join(name, range(NUM_SAMPLES))).loss.item()
    trainer.args.per_device_eval_batch_size = NUM_SAMPLES
    assert trainer.evaluate()["eval_loss"] == pytest.approx(whole, rel=1e-3)


@pytest.mark.distributed
def test_processes_take_the_same_step(run_processes):
    for found in run_processes("run_expert_term", 2):
        for case, gradients in found.items():
            assert distance(gradients, compute_truth(case.partition(",")[0])) < 2e-6, case
        assert len(found) == len(ON_PROCESSES) + 1


@pytest.mark.parametrize(
    "name", ["sft", "dpo and sft", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("dpo", "orpo", "tpo"))]
)
def test_trainers_of_trl_with_experts(name, tmp_path):
    """The truth is TRL's trainer with 8 and 3 samples in one micro-batch; it adds the balance to one term or to several."""
    options = {"learning_rate": 0.0, "train_sampling_strategy": "sequential", "dtype": torch.float32}

    def take_steps(b, k, is_exact=True):
        fresh_accelerator()
        trainer = trl_runs.make_trainer(
            name, tmp_path, b, k, is_exact, model=build_words(tmp_path / "model"), **options
        )
        trainer.train()
        return trainer

    plain = take_steps(8, 1, is_exact=False)
    assert distance(take_steps(2, 4, is_exact=False).gradients.all, plain.gradients.all) > 0.02
    for b, k in ((4, 2), (1, 8)):
        trainer = take_steps(b, k)
        assert distance(trainer.gradients.all, plain.gradients.all) < 2e-6
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=2e-3)


def test_noise_is_the_same_in_both_forwards(tmp_path):
    """Another noise than before would be refused in the first step."""
    gradients = []
    for rate in (0.0, 0.5):
        model = build("MixtralForCausalLM")
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = rate
        gradients.append(torch.cat(train("MixtralForCausalLM", 4, 2, tmp_path, model=model)[0]))
    assert gradients[1].isfinite().all()
    assert torch.dist(*gradients) > 0.05 * gradients[0].norm()


def test_recomputed_activations_change_nothing(tmp_path):
    name = "Qwen3MoeForCausalLM"
    found, _ = train(name, 2, 4, tmp_path, gradient_checkpointing=True)
    assert distance(found, compute_truth(name)) < 2e-6


def test_another_weight_than_that_of_the_config_is_refused(tmp_path):
    """The model has its weight beside its config."""
    model = build("Qwen3MoeForCausalLM")
    model.router_aux_loss_coef = 1.0
    with pytest.raises(UsageError, match="has 1 times the balance of experts, but router_aux_loss_coef"):
        train("Qwen3MoeForCausalLM", 2, 2, tmp_path, model=model)


def test_a_head_without_the_term_is_as_without_its_weight(tmp_path):
    """Its config asks for router logits, but its forward computes no balance."""
    true = compute_truth("Qwen3MoeForSequenceClassification")
    assert distance(train("Qwen3MoeForSequenceClassification", 2, 4, tmp_path)[0], true) < 2e-6


def test_router_logits_in_16_bits(tmp_path):
    """The model's function rounds each probability to 16 bits; this one does not."""
    names = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
    for name in names:
        found, _ = train(name, 2, 4, tmp_path, model=build(name).bfloat16())
        assert distance([gradient.float() for gradient in found], compute_truth(name)) < 0.05


def test_another_formula_is_refused(tmp_path, monkeypatch):
    module = transformers.models.qwen3_moe.modeling_qwen3_moe
    own = module.load_balancing_loss_func
    monkeypatch.setitem(vars(module), "load_balancing_loss_func", lambda *words: 2 * own(*words))
    with pytest.raises(UsageError, match="by another formula"):
        train("Qwen3MoeForCausalLM", 2, 2, tmp_path)


def test_without_its_module_the_balance_is_refused():
    model = build("MixtralForCausalLM")
    with pytest.raises(UsageError, match="output_router_logits = False"):
        HeadLoss(model)(model, join("MixtralForCausalLM", range(2)))


def test_packed_rows_do_not_drop_the_balance():
    with pytest.raises(UsageError, match="balances experts"):
        PackedLoss(build("MixtralForCausalLM"))
