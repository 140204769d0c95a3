"""Losses of the routers of experts: those of one large batch, however a step is cut, in the oracle and in the scripts."""

import itertools

import pytest
import run_router_loss as steps
import torch
import transformers
from cases import keep, thorough
from chat_bases import save_base
from common import all_metrics, load_script, metrics
from compare import check, hash_run, parameters, relative
from run_router_loss import CONFIGS, CUTS, FAST, SIGMOIDS, WEIGHT

from samestep.contrib.whole_batch.router_loss import BIAS, RouterLoss
from samestep.errors import RunError, UsageError
from samestep.models.causal_lm import CausalLmSums
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.training.checkpoint import checkpoints, read

PROGRAM = "finetune_causal_lm"
WEIGHTS = (
    " ".join(f"--{name} none" for name in ("architecture", "vocab_size", *CausalLmFineTuning.SHAPE))
    + " --num_generations 0 --max_train_steps 4 --global_batch_size 10 --model_name_or_path "
)
KINDS = {"Mixtral": "mixtral", "DeepseekV3": "deepseek_v3"}
GLOBAL = " --router_loss global --router_loss_weight 0.3 --router_z_loss_weight 0.1"
BIASED = " --router_loss bias --router_loss_weight 0.01"


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


# ------------------------------------------------------------------------------------------------------ beside plain PyTorch


@pytest.mark.parametrize(
    ("name", "kind"), keep(steps.list_cases(tuple(CONFIGS)), steps.list_cases((*FAST, "GptOss")))
)
def test_every_cut_is_the_loss_of_one_large_batch(name, kind):
    """GPT-OSS computes in float64 throughout; others normalise in float32."""
    dtypes = {torch.float32: 1e-5} | ({torch.float64: 1e-12} if name == "GptOss" else {})
    for dtype, tolerance in dtypes.items():
        true = steps.compute_truth(name, kind, dtype)
        for cut in CUTS[1]:
            step = steps.take_step(name, kind, cut, dtype=dtype)
            assert distance(step["gradient"], true["gradient"]) < tolerance, cut
            assert all(map(torch.equal, step["noted"].loads, true["loads"]))
            values = sum(step["noted"].values)
            assert values[1 if kind == "z" else 0].item() == pytest.approx(true["value"], rel=tolerance)
            if kind == "bias":
                assert all(map(torch.equal, step["biases"], move(name, dtype, true["loads"])))


def move(name: str, dtype: torch.dtype, loads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Move a model's biases by their formula."""
    biases = [buffer for name, buffer in steps.build(name, dtype).named_buffers() if name.endswith(BIAS)]
    return [
        bias + WEIGHT * torch.sign(load.double().mean() - load).to(bias) for bias, load in zip(biases, loads, strict=True)
    ]


def test_loads_of_micro_batches_are_another_loss():
    """The control: f of each micro-batch alone, as in loops of others."""

    class Local(RouterLoss):
        def prepare(self, *arguments, **options):
            super().prepare(*arguments, **options)
            self._loads = []

    true = steps.compute_truth("Mixtral", "global")["gradient"]
    assert distance(steps.take_step("Mixtral", "global", CUTS[1][1], loss_of=Local)["gradient"], true) > 1e-2
    without = steps.compute_truth("Mixtral", "none")["gradient"]
    assert distance(without, true) > 1e-2


@pytest.mark.distributed
@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_share_one_step(run_processes, num_processes):
    """One of three has no sample at all."""
    results = run_processes("run_router_loss", num_processes)
    for name, kind in steps.list_cases(FAST):
        true = steps.compute_truth(name, kind)
        for number in range(len(CUTS[num_processes])):
            of_case = [result[name, kind, number] for result in results]
            for result in of_case:
                assert distance(result["gradient"], true["gradient"]) < 1e-5, (name, kind, number)
                if kind == "bias":
                    assert all(map(torch.equal, result["biases"], move(name, torch.float32, true["loads"])))
            loads = [sum(layer) for layer in zip(*(result["loads"] for result in of_case), strict=True)]
            assert all(map(torch.equal, loads, true["loads"]))
    for result in results:
        assert result["memory"] == ["RepeatStep", "OutOfMemoryError" if result is results[-1] else "RunError"]


@pytest.mark.parametrize("name", ["Mixtral", thorough("DeepseekV3")])
def test_both_forwards_have_the_same_dropout(name):
    """And layers whose activations are computed again."""
    whole = steps.take_step(name, "global", CUTS[1][0], dropout=0.5)
    assert distance(whole["gradient"], steps.compute_truth(name, "global")["gradient"]) > 1e-2
    for cut, recomputes in ((CUTS[1][1], False), (CUTS[1][2], False), (CUTS[1][1], True)):
        step = steps.take_step(name, "global", cut, dropout=0.5, recomputes=recomputes)
        assert distance(step["gradient"], whole["gradient"]) < 1e-5
        assert all(map(torch.equal, step["noted"].loads, whole["noted"].loads))


@pytest.mark.parametrize("name", ["Mixtral", thorough("Qwen3Next")])
def test_only_trained_tokens_count(name):
    """Each by the logits of the token before it: no prompts, no padding, no last tokens."""
    model, sequences = CausalLmSums(steps.build(name)).train(), steps.make_sequences()
    assert model.is_padded == (name == "Qwen3Next")
    loss = RouterLoss(model, "global", 1.0)
    micro_batch = steps.make_micro_batch(sequences)
    seen = []
    for router in loss.routers:
        router.register_forward_hook(lambda router, inputs, output: seen.append(output))
    loss.prepare([micro_batch], None)
    seen.clear()
    model(**micro_batch)
    loss.correction()
    rows, _, _ = model.locate_targets(micro_batch)
    num_trained = sum(int(is_trained.sum()) for _, is_trained in sequences)
    assert len(rows) == num_trained < sum(map(len, (ids for ids, _ in sequences)))
    assert all(load.sum() == 2 * num_trained for load in loss.noted.loads)
    # The same rows as in a micro-batch of a sequence alone
    together = [logits[rows] for logits, _, _ in seen]
    for number, first in zip(range(len(sequences)), itertools.accumulate(map(count, sequences), initial=0), strict=False):
        seen.clear()
        alone = steps.make_micro_batch(sequences[number : number + 1])
        with torch.no_grad():
            model(**alone)
        for layer, (logits, _, _) in enumerate(seen):
            expected = logits[model.locate_targets(alone)[0]]
            torch.testing.assert_close(together[layer][first : first + len(expected)], expected, rtol=1e-3, atol=1e-5)


def count(sequence: tuple[torch.Tensor, torch.Tensor]) -> int:
    return int(sequence[1].sum())


@pytest.mark.parametrize("kind", ["global", "sequence", "bias"])
def test_nothing_to_count_is_no_loss(kind):
    """Micro-batches without trained tokens, and one without a sample; experts that nobody chose."""
    model = CausalLmSums(steps.build("DeepseekV3")).train()
    loss = RouterLoss(model, kind, 1.0, 1.0)
    before = [router.e_score_correction_bias.clone() for router in loss.routers]
    micro_batches = [steps.make_micro_batch(sequences) for sequences in (steps.make_sequences()[2:3], [])]
    loss.prepare(micro_batches, None)
    for micro_batch in micro_batches:
        sums, _ = model(**micro_batch)
        (sums.sum() + loss.correction()).backward()
    loss.finish()
    loss.move_biases(torch.tensor(True))
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    assert all(torch.equal(router.e_score_correction_bias, old) for router, old in zip(loss.routers, before, strict=True))
    for router in loss.routers:
        router.e_score_correction_bias[:] = torch.tensor([9.0, 9.0, 0.0, 0.0])
    micro_batches = [steps.make_micro_batch(steps.make_sequences())]
    loss.prepare(micro_batches, None)
    model(**micro_batches[0])
    assert loss.correction().isfinite()
    assert all(load[2:].tolist() == [0, 0] for load in loss.noted.loads)


def test_what_cannot_be_balanced_is_said_in_one_line():
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**steps.BASE))
    with pytest.raises(UsageError, match=r"^router_loss is global, but LlamaForCausalLM has no routers that .*: set it to null"):
        RouterLoss(CausalLmSums(llama), "global", 0.1)
    with pytest.raises(UsageError, match=r"^router_z_loss_weight is 0.1, but LlamaForCausalLM has no routers"):
        RouterLoss(CausalLmSums(llama), None, None, 0.1)
    with pytest.raises(UsageError, match=r"^router_loss is bias, but MixtralForCausalLM has routers without a bias"):
        RouterLoss(CausalLmSums(steps.build("Mixtral")), "bias", 0.1)
    odd = CausalLmSums(steps.build("Mixtral")).train()
    loss = RouterLoss(odd, "global", 0.1)
    for router in loss.routers:
        router.register_forward_hook(lambda router, inputs, output: (output[0][:, None], *output[1:]), prepend=True)
        router.forward = lambda hidden: (hidden, hidden, hidden)
    with pytest.raises(UsageError, match="has routers that do not return logits"):
        loss.prepare([steps.make_micro_batch(steps.make_sequences())], None)
