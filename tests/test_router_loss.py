"""Losses of the routers of experts: those of one large batch, however a step is cut, in the oracle and in the scripts."""

import itertools
from types import SimpleNamespace

import pytest
import run_router_loss as steps
import torch
import transformers
from cases import keep, thorough
from chat_bases import save_base
from common import all_metrics, fresh_accelerator, metrics
from compare import check, hash_run, parameters, relative
from run_router_loss import CONFIGS, CUTS, FAST, WEIGHT

from samestep.contrib.trackers import Trackers
from samestep.contrib.watching.watch import RunReader
from samestep.contrib.whole_batch.router_loss import RouterLoss
from samestep.contrib.whole_batch.routers import BIAS
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
BIASED = " --router_loss bias --router_loss_weight 0.05"


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


# ------------------------------------------------------------------------------------------------------ beside plain PyTorch


@pytest.mark.parametrize(
    ("name", "kind"), keep(steps.list_cases(tuple(CONFIGS)), [*steps.list_cases(FAST), ("GptOss", "global")])
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
        bias + WEIGHT * torch.sign(load.double().mean() - load).to(bias)
        for bias, load in zip(biases, loads, strict=True)
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
        assert result["failures"] == ["RepeatStep", "KeyError" if result is results[-1] else "RunError"]


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
    for router in loss.routers.modules:
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
    for number, first in zip(
        range(len(sequences)), itertools.accumulate(map(count, sequences), initial=0), strict=False
    ):
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
    before = [router.e_score_correction_bias.clone() for router in loss.routers.modules]
    micro_batches = [steps.make_micro_batch(sequences) for sequences in (steps.make_sequences()[2:3], [])]
    loss.prepare(micro_batches, None)
    for micro_batch in micro_batches:
        sums, _ = model(**micro_batch)
        (sums.sum() + loss.correction()).backward()
    loss.finish()
    loss.move_biases(torch.tensor(True))
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    assert all(
        torch.equal(router.e_score_correction_bias, old)
        for router, old in zip(loss.routers.modules, before, strict=True)
    )
    if kind == "bias":
        loss._loads = [load + torch.arange(len(load)) for load in loss._loads]
        for is_taken in (False, True):
            loss.move_biases(torch.tensor(is_taken))
            moves = [
                router.e_score_correction_bias - old for router, old in zip(loss.routers.modules, before, strict=True)
            ]
            assert [move.abs().max().item() for move in moves] == pytest.approx([float(is_taken)] * 2)
    for router in loss.routers.modules:
        router.e_score_correction_bias[:] = torch.tensor([9.0, 9.0, 0.0, 0.0])
    micro_batches = [steps.make_micro_batch(steps.make_sequences())]
    loss.prepare(micro_batches, None)
    model(**micro_batches[0])
    assert loss.correction().isfinite()
    assert all(load[2:].tolist() == [0, 0] for load in loss.noted.loads)


def test_what_cannot_be_balanced_is_said_in_one_line():
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**steps.BASE))
    with pytest.raises(
        UsageError, match=r"^router_loss is global, but LlamaForCausalLM has no routers that .*: set it to null"
    ):
        RouterLoss(CausalLmSums(llama), "global", 0.1)
    with pytest.raises(UsageError, match=r"^router_z_loss_weight is 0.1, but LlamaForCausalLM has no routers"):
        RouterLoss(CausalLmSums(llama), None, None, 0.1)
    with pytest.raises(UsageError, match=r"^router_loss is bias, but MixtralForCausalLM has routers without a bias"):
        RouterLoss(CausalLmSums(steps.build("Mixtral")), "bias", 0.1)
    odd = CausalLmSums(steps.build("Mixtral")).train()
    loss = RouterLoss(odd, "global", 0.1)
    for router in loss.routers.modules:
        router.register_forward_hook(lambda router, inputs, output: (output[0][:, None], *output[1:]), prepend=True)
        router.forward = lambda hidden: (hidden, hidden, hidden)
    with pytest.raises(UsageError, match="has routers that do not return logits"):
        loss.prepare([steps.make_micro_batch(steps.make_sequences())], None)


# --------------------------------------------------------------------------------------------------------------- in the scripts


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Of each model, the flags that fine-tune it."""
    found = {}
    for name, kind in KINDS.items():
        fields = {field: value for field, value in CONFIGS[name].items() if not field.endswith("_token_id")}
        del fields["vocab_size"], fields["max_position_embeddings"]
        found[name] = WEIGHTS + str(save_base(tmp_path_factory.mktemp(name), kind, **fields))
    return found


@pytest.fixture
def finetune(train):
    def run(name, flags, **options):
        return train(name, flags, program=PROGRAM, **options)

    return run


def experts_of(folder) -> list[list]:
    return [[line["max_expert_load"], line["unused_experts"]] for line in metrics(folder)]


def biases_of(folder) -> torch.Tensor:
    tensors = read(checkpoints(folder)[-1], "model")
    return torch.stack([tensor for name, tensor in sorted(tensors.items()) if name.endswith(BIAS)])


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "more"), [("DeepseekV3", BIASED), thorough("Mixtral", GLOBAL)])
def test_a_run_moves_between_numbers_of_processes(finetune, train_on, bases, name, more):
    """Biases, too, are in its checkpoints."""
    flags = bases[name] + more
    whole = finetune("whole", f"{flags} --per_device_train_batch_size 10")
    assert [set(line) >= {"max_expert_load", "unused_experts"} for line in metrics(whole)] == [True] * 4
    moved = finetune("finetune_causal_lm/moved", f"{flags} --per_device_train_batch_size 3 --stop_after_step 1")
    for num_processes, last in ((2, 2), (3, 4)):
        resumed = f"{flags} --per_device_train_batch_size 2 --stop_after_step {last} --resume_from_checkpoint latest"
        train_on(num_processes, {f"{PROGRAM}/moved": resumed})
    reader = RunReader(moved)
    reader.update()
    assert reader.problems == []
    assert "loss" in reader.curves
    assert not {"max_expert_load", "unused_experts"} & reader.curves.keys()
    check(moved, whole, "float32")
    assert experts_of(moved) == experts_of(whole)
    if more == BIASED:
        assert torch.equal(biases_of(moved), biases_of(whole))
        steps_moved = biases_of(whole) / 0.05
        assert 1 < steps_moved.abs().max() < 4.001
        torch.testing.assert_close(steps_moved, steps_moved.round(), rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_process_without_samples(finetune, train_on, bases):
    runs = {
        name: f"{bases[name]}{more} --global_batch_size 2 --per_device_train_batch_size 1 --max_train_steps 2"
        for name, more in (("Mixtral", GLOBAL), ("DeepseekV3", BIASED))
    }
    folder = train_on(3, {f"{PROGRAM}/{name}": flags for name, flags in runs.items()}) / PROGRAM
    for name, flags in runs.items():
        whole = finetune(name, flags.replace("batch_size 1", "batch_size 2"))
        check(folder / name, whole, "float32")
        assert experts_of(folder / name) == experts_of(whole)


@pytest.mark.thorough
@pytest.mark.distributed
def test_the_bits_are_the_same_on_any_number_of_processes(finetune, train_on, bases):
    runs = {
        name: f"{bases[name]}{more} --reproducible 3" for name, more in (("Mixtral", GLOBAL), ("DeepseekV3", BIASED))
    }
    folder = train_on(2, {f"{PROGRAM}/{name}": flags for name, flags in runs.items()}) / PROGRAM
    for name, flags in runs.items():
        assert hash_run(folder / name) == hash_run(finetune(name, flags))


CASES = {
    "lora": ("Mixtral", f"{GLOBAL} --lora_rank 4 --lora_alpha 8 --lora_dropout 0.1 --lora_targets q_proj v_proj"),
    "checkpointing": ("Mixtral", f"{GLOBAL} --gradient_checkpointing"),
    "sequence": ("DeepseekV3", f"{GLOBAL.replace('global', 'sequence')} --loss_weighting sample"),
    "dpo": ("Mixtral", f"{GLOBAL} --objective dpo --dataset_name builtin/drawn_pairs --train_on completions"),
    "reward": ("Mixtral", f"{GLOBAL} --objective reward --dataset_name builtin/drawn_pairs --train_on completions"),
    "orpo": ("DeepseekV3", f"{BIASED} --objective orpo --dataset_name builtin/drawn_pairs --train_on completions"),
}


@pytest.mark.parametrize("case", keep(CASES, ["lora"]))
def test_every_cut_in_time_is_the_same_run(finetune, bases, case):
    name, more = CASES[case]
    whole, cut = (
        finetune(f"cut{size}", f"{bases[name]}{more} --per_device_train_batch_size {size}") for size in (10, 3)
    )
    check(cut, whole, "float32")
    assert experts_of(cut) == experts_of(whole)
    if case == "lora":  # a third training is for `make test-thorough`
        return
    for flags in (GLOBAL, GLOBAL.replace("global", "sequence"), BIASED):
        more = more.replace(flags, "")
    without = finetune("without", f"{bases[name]}{more} --per_device_train_batch_size 10")
    assert relative(parameters(without), parameters(whole)) > 1e-4, "the loss of routers does something"


@pytest.mark.thorough
def test_gradients_that_go_into_moments_at_once(finetune, bases):
    """The first moments are of the gradient of the step."""
    flags = f"{bases['Mixtral']}{GLOBAL} --accumulation optimizer --second_moment unbiased --max_grad_norm none"
    moments = []
    for size in (10, 3):
        folder = finetune(f"folded{size}", f"{flags} --max_train_steps 1 --per_device_train_batch_size {size}")
        tensors = read(checkpoints(folder)[-1], "optimizer")
        moments.append(torch.cat([m.flatten() for name, m in sorted(tensors.items()) if name.endswith("/exp_avg")]))
    assert distance(*moments) < 1e-5


@pytest.mark.thorough
@pytest.mark.distributed
def test_sharded_weights_take_the_same_steps(finetune, train_on, bases):
    """FSDP2 on two processes, from one process's checkpoint and to it."""
    for name, more in (("Mixtral", GLOBAL), ("DeepseekV3", BIASED)):
        flags = bases[name] + more
        whole = finetune(f"whole {name}".replace(" ", "_"), f"{flags} --per_device_train_batch_size 10")
        moved = f"{PROGRAM}/{name}"
        folder = finetune(moved, f"{flags} --per_device_train_batch_size 3 --stop_after_step 1")
        resumed = f"{flags} --per_device_train_batch_size 3 --resume_from_checkpoint latest --stop_after_step"
        train_on(2, {moved: f"{resumed} 3"}, "fsdp2_2xcpu")
        check(finetune(moved, f"{resumed} 4"), whole, "float32")
        assert experts_of(folder) == experts_of(whole)


@pytest.mark.thorough
def test_pretraining_balances_experts(scripts, corpus, tmp_path):
    """In rows of documents, of which every token is trained."""
    flags = (
        "--recipe gpt_modern_small_cpu --architecture mixtral --vocab_size 400 --block_size 48 --max_position_embeddings 48 "
        "--hidden_size 32 --num_hidden_layers 2 --num_attention_heads 2 --num_key_value_heads none --intermediate_size 48 "
        "--zero_init_projections false --max_train_steps 3 --num_warmup_steps 1 --global_batch_size 10 --document_mask true "
        "--speed safe"
    )
    for kind in ("global", "sequence"):
        folders = [tmp_path / f"{kind}{size}" for size in (10, 3)]
        for folder, size in zip(folders, (10, 3), strict=True):
            fresh_accelerator()
            more = f"{GLOBAL.replace('global', kind)} --per_device_train_batch_size {size}"
            argv = f"{flags}{more} --train_file {corpus} --output_dir {folder}"
            scripts["pretrain_gpt2"].main(argv.split())
        check(folders[1], folders[0], "float32")
        assert experts_of(folders[1]) == experts_of(folders[0])


def test_memory_that_runs_out_while_loads_are_counted(finetune, bases, after_forward):
    """The step is done again in smaller micro-batches, from its loads on."""
    whole = finetune("whole", f"{bases['Mixtral']}{GLOBAL} --per_device_train_batch_size 10")
    seen = []

    def fail(model, outputs, **micro_batch):
        if not torch.is_grad_enabled() and model.training:
            seen.append(len(micro_batch["ends"]) - 1)
            if len(seen) > 4 and seen[-1] > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    after_forward(CausalLmSums, fail)
    cut = finetune("cut", f"{bases['Mixtral']}{GLOBAL} --per_device_train_batch_size 5")
    events = [line for line in all_metrics(cut) if "event" in line]
    assert [line["event"] for line in events] == ["memory ran out: the step is done again in smaller micro-batches"]
    assert max(seen) == 5
    assert seen[-4:] == [3, 3, 3, 1]
    check(cut, whole, "float32")
    with pytest.raises(RunError, match="memory ran out on this process in step 1, with micro-batches of 5 samples"):
        finetune("exact", f"{bases['Mixtral']}{GLOBAL} --reproducible 5")


def test_trackers_get_a_curve_of_each_layer():
    tracker, sent = Trackers.__new__(Trackers), []
    tracker.accelerator = SimpleNamespace(log=lambda values, step: sent.append((step, values)))
    tracker.lines_written([{"step": 3, "loss": 1.0, "unused_experts": [0, 2]}])
    assert sent == [(3, {"train/loss": 1.0, "train/unused_experts/0": 0, "train/unused_experts/1": 2})]
