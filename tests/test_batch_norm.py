"""Statistics of a micro-batch on all processes, and of a whole step however it is cut."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from compare import BF16
from run_batch_norm import (
    CANONICAL,
    LAYER_SIZES,
    MICRO_BATCHES,
    build,
    canonical_step,
    cut,
    gradients,
    layer_and_maps,
    make_loss,
    micro_steps,
    passes,
    same_state,
    samples,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from samestep.contrib.whole_step import WholeStep, deviation
from samestep.errors import UsageError
from samestep.step.batch_norm import BatchNorm, FrozenBatchNorm, freeze, synchronize

CUT = cut(MICRO_BATCHES[1], 0)
ALL = [slice(0, 9)]


def miss(ours: torch.Tensor, true: torch.Tensor) -> float:
    return ((ours - true).norm() / true.norm()).item()


def one_batch(model: nn.Module, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute gradient and state after the step in one batch, by torch alone."""
    model = copy.deepcopy(model)
    make_loss(model, dtype)(ALL[0]).backward()
    return gradients(model), model.state_dict()


def take(model: nn.Module, loss, micro_batches=CUT, **kwargs) -> WholeStep:
    """Compute the gradient of a step in micro-batches, with the statistics of the whole step."""
    synchronize(model)
    whole = WholeStep(model, **kwargs)
    whole.prepare(micro_batches, loss)
    for micro_batch in micro_batches:
        (loss(micro_batch) + whole.correction()).backward()
    whole.finish()
    return whole


def assert_same_state(ours: dict[str, torch.Tensor], true: dict[str, torch.Tensor], rtol: float = 1e-12) -> None:
    assert list(ours) == list(true)
    for name, value in true.items():
        assert torch.allclose(ours[name], value, rtol=rtol, atol=rtol), name


@pytest.fixture(scope="module", params=[2, 3])
def processes(request, run_processes):
    """Run the processes of `run_batch_norm.py`; the results of each."""
    return run_processes("run_batch_norm", request.param)


def test_on_one_process_it_is_batch_norm_bit_for_bit():
    layer, maps = layer_and_maps()
    ours = nn.Sequential(copy.deepcopy(layer))
    synchronize(ours)
    assert type(ours[0]) is BatchNorm
    for theirs, actual in zip(micro_steps(layer, maps).items(), micro_steps(ours[0], maps).items(), strict=True):
        assert theirs[0] == actual[0]
        for left, right in (
            zip(theirs[1], actual[1], strict=True) if theirs[0] in ("y", "dx") else [(theirs[1], actual[1])]
        ):
            assert torch.equal(left, right), theirs[0]
    assert torch.equal(ours.eval()(maps[0]), layer.eval()(maps[0]))


@pytest.mark.distributed
def test_processes_normalise_together(processes):
    layer, maps = layer_and_maps()
    true = micro_steps(layer, maps)
    results = [process["one_layer"] for process in processes]
    for step, sizes in enumerate(LAYER_SIZES[len(processes)]):
        for name in ("y", "dx"):
            assert [len(result[name][step]) for result in results] == sizes
            assert miss(torch.cat([result[name][step] for result in results]), true[name][step]) < 1e-12
    for name in ("weight.grad", "bias.grad"):
        assert miss(sum(result[name] for result in results), true[name]) < 1e-12, "shares add up"
    for result in results:
        assert_same_state({name: result[name] for name in layer.state_dict()}, layer.state_dict())


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["plain", "residual"])
def test_the_whole_step_on_processes(processes, kind):
    gradient, state = one_batch(build(kind))
    for process in processes:
        data = process[kind]
        assert miss(data["gradient"], gradient) < 1e-11
        assert data["collectives"] == 2 * sum(data["passes"]) - 2, "a pass: its numbers, and whether it was the last"
        assert_same_state(data["state"], state)


@pytest.mark.distributed
@pytest.mark.parametrize("place", range(len(CANONICAL)))
def test_a_canonical_step_is_the_same_to_the_bit_on_processes(processes, place):
    kind, dtype = CANONICAL[place]
    alone, shares = canonical_step(kind, dtype, 0, 1), [process["canonical"][place] for process in processes]
    assert sorted(number for share in shares for number in share["gradients"]) == list(range(6))
    for share in shares:
        for number, gradient in share["gradients"].items():
            assert torch.equal(gradient, alone["gradients"][number]), number
        assert all(torch.equal(value, alone["state"][name]) for name, value in share["state"].items())
        assert share["passes"] == alone["passes"]
        assert share["collectives"] == 0, "in forward and backward of a cell"


@pytest.mark.parametrize(
    ("kind", "dtype", "bound"), [(*CANONICAL[0], 1e-11), (*CANONICAL[1], 1e-5), (*CANONICAL[2], 1e-11)]
)
def test_a_canonical_step_is_the_step_in_one_batch(kind, dtype, bound):
    gradient, state = one_batch(build(kind, dtype), dtype)
    step = canonical_step(kind, dtype, 0, 1)
    assert miss(sum(step["gradients"].values()), gradient) < bound
    assert_same_state(step["state"], state, rtol=bound)
    assert max(step["passes"]) <= 4


@pytest.mark.distributed
def test_the_whole_step_under_ddp(processes):
    gradient, _ = one_batch(build("residual"))
    for process in processes:
        assert miss(process["under_ddp"]["gradient"], gradient) < 1e-11


@pytest.mark.distributed
def test_deviation_on_processes(processes):
    for process in processes:
        cut_in_two, one_micro_batch = process["deviations"]["deviations"]
        assert 0.01 < cut_in_two < 2
        assert one_micro_batch < 1e-12, "a micro-batch's statistics are those of all processes"
        assert process["deviations"]["deviations"] == processes[0]["deviations"]["deviations"]
        assert process["deviations"]["is_untouched"]


@pytest.mark.distributed
def test_who_fails_does_not_leave_the_others_waiting(processes):
    for rank, process in enumerate(processes):
        is_last = rank == len(processes) - 1
        assert process["failures"]["errors"] == ["MemoryError" if is_last else "PeerError"] * 4
        assert process["failures"]["passes"] == processes[0]["failures"]["passes"], "numbers that are not finite"
        assert max(process["failures"]["passes"]) <= 4


@pytest.mark.parametrize("kind", ["plain", "residual"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_a_cut_step_is_the_step_in_one_batch(kind, dtype, bound):
    model = build(kind, dtype)
    gradient, state = one_batch(model, dtype)
    whole = take(model, make_loss(model, dtype))
    assert miss(gradients(model), gradient) < bound
    assert_same_state(model.state_dict(), state, rtol=bound)
    assert max(passes(whole)) <= len(whole.layers) == 4


@pytest.mark.parametrize("kind", ["plain", "residual"])
def test_without_it_a_cut_step_is_another(kind):
    model = build(kind)
    gradient, _ = one_batch(model)
    synchronize(model)
    for micro_batch in CUT:
        make_loss(model)(micro_batch).backward()
    assert miss(gradients(model), gradient) > 1e-2


def test_as_many_passes_as_layers_are_enough_and_tolerance_ends_them_earlier():
    model = build("plain")
    gradient, _ = one_batch(model)
    errors, numbers = [], []
    for tolerance in (-1.0, 0.1, 1e9):
        ours = copy.deepcopy(model)
        numbers.append(passes(take(ours, make_loss(ours), tolerance=tolerance)))
        errors.append(miss(gradients(ours), gradient))
    assert numbers[0] == [4, 4]
    assert numbers[2] == [2, 2]
    assert errors[0] < 1e-11 < 1e-6 < errors[1] <= errors[2]


def test_micro_batches_learn_from_each_other_and_half_precision_ends_earlier():
    """A chain needs fewer passes than it has layers."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(30):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    loss, micro_batches = make_loss(model, torch.float32), cut([[3, 3, 3]], 0)
    whole = take(model, loss, micro_batches, tolerance=1e-4)
    assert whole.num_forward_passes <= 26
    assert whole.num_adjoint_passes <= 20
    with torch.autocast("cpu", torch.bfloat16):
        half = take(model, loss, micro_batches)
    assert half.num_forward_passes < whole.num_forward_passes
    assert half.num_adjoint_passes < whole.num_adjoint_passes


def test_steps_follow_each_other():
    model = build("residual")
    theirs = copy.deepcopy(model)
    for micro_batches in (CUT, cut([[2, 7]], 0), ALL):
        model.zero_grad(), theirs.zero_grad()
        make_loss(theirs)(ALL[0]).backward()
        take(model, make_loss(model), micro_batches)
        assert miss(gradients(model), gradients(theirs)) < 1e-11
        assert_same_state(model.state_dict(), theirs.state_dict())
        with torch.no_grad():
            for ours, true in zip(model.parameters(), theirs.parameters(), strict=True):
                ours -= 0.05 * ours.grad
                true -= 0.05 * true.grad


def test_the_loss_stays_the_loss_and_the_gradient_of_prepare_is_nowhere():
    model = build("plain")
    synchronize(model)
    whole, loss = WholeStep(model), make_loss(model)
    assert whole.correction() == 0
    whole.prepare(CUT, loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(int(buffer) == 0 for name, buffer in model.named_buffers() if "num_batches" in name)
    total = 0
    for micro_batch in CUT:
        share = loss(micro_batch)
        correction = whole.correction()
        assert correction == 0
        assert correction.requires_grad
        total += (share + correction).item()
    assert total == pytest.approx(make_loss(build("plain"))(ALL[0]).item(), rel=1e-12)


def test_evaluation_in_between_uses_running_statistics():
    model = build("residual")
    synchronize(model)
    whole, loss = WholeStep(model), make_loss(model)
    expected = copy.deepcopy(model).eval()(samples()[0])
    whole.prepare(CUT, loss)
    assert torch.equal(model.eval()(samples()[0]), expected)
    model.train()
    loss(CUT[0])
    whole.release()
    assert all(layer.mode is None for layer in whole.layers)
    assert torch.equal(model.eval()(samples()[0]), expected), "released: as if nothing had been"


def remove_weight(model):
    with torch.no_grad():
        model.body[1].weight.zero_()


def frozen_weights(model):
    for name in ("stem", "body"):
        getattr(model, name).requires_grad_(False)
    model.body[0].weight.requires_grad_(True)


def neither_weight_nor_bias(model):
    model.stem[1] = nn.BatchNorm2d(4, affine=False).double()


def no_running_statistics(model):
    model.stem[1] = nn.BatchNorm2d(4, track_running_stats=False).double()


def cumulative(model):
    model.stem[1].momentum = None


def large_eps(model):
    model.stem[1].eps = 0.5


def checkpointed(model):
    forward = model.body.forward
    model.body.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


def images_first(model):
    model.stem.insert(0, nn.BatchNorm2d(3).double())


@pytest.mark.parametrize(
    "change",
    [
        remove_weight,
        frozen_weights,
        neither_weight_nor_bias,
        no_running_statistics,
        cumulative,
        large_eps,
        images_first,
    ],
    ids=lambda change: change.__name__,
)
def test_all_kinds_of_layers(change):
    model = build("residual")
    change(model)
    gradient, state = one_batch(model)
    take(model, make_loss(model))
    assert miss(gradients(model), gradient) < 1e-11
    assert_same_state(model.state_dict(), state)


def test_with_checkpointing():
    model = build("residual")
    gradient, state = one_batch(model)
    checkpointed(model)
    take(model, make_loss(model))
    assert miss(gradients(model), gradient) < 1e-11
    assert_same_state(model.state_dict(), state)


def test_micro_batches_without_samples_and_a_scaled_loss():
    model = build("plain")
    gradient, state = one_batch(model)
    synchronize(model)
    whole, loss = WholeStep(model), make_loss(model)
    micro_batches = cut([[0, 5, 0, 4]], 0)
    whole.prepare(micro_batches, lambda micro_batch: 1024 * loss(micro_batch))
    for micro_batch in micro_batches:
        (1024 * loss(micro_batch) + whole.correction()).backward()
    whole.finish()
    assert miss(gradients(model) / 1024, gradient) < 1e-11
    assert_same_state(model.state_dict(), state)


def test_layers_that_are_not_reached_or_not_by_all_micro_batches():
    """Samples from 5 on take another branch."""

    def partial_loss(model):
        images, labels = samples()

        def loss(micro_batch):
            parts = []
            for layer, some in (
                (model[0], slice(micro_batch.start, min(micro_batch.stop, 5))),
                (model[1], slice(max(5, micro_batch.start), micro_batch.stop)),
            ):
                if some.start < some.stop:
                    maps = layer(images[some])
                    parts.append(F.cross_entropy(model[3](maps), labels[some], reduction="sum") / 9)
            return sum(parts)

        return loss

    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 3, 3, padding=1)
    branches = [nn.Sequential(nn.BatchNorm2d(3), convolution, nn.BatchNorm2d(3)) for _ in range(3)]
    model = nn.Sequential(*branches, nn.Sequential(nn.Flatten(), nn.Linear(108, 5))).double()
    theirs = copy.deepcopy(model)
    partial_loss(theirs)(ALL[0]).backward()
    whole = take(model, partial_loss(model), cut([[4, 2, 3]], 0))
    assert miss(gradients(model), gradients(theirs)) < 1e-11
    assert_same_state(model.state_dict(), theirs.state_dict())
    assert not model[2][0].num_batches_tracked
    assert max(passes(whole)) <= 6


def test_nothing_to_normalise():
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 5)).double()
    gradient, _ = one_batch(model)
    whole = take(model, make_loss(model))
    assert passes(whole) == [0, 0]
    assert miss(gradients(model), gradient) < 1e-14
    assert deviation(model, CUT, make_loss(model)) < 1e-14


def test_a_layer_that_is_called_twice_is_refused():
    layer = nn.BatchNorm2d(3)
    model = nn.Sequential(layer, nn.Conv2d(3, 3, 1), layer, nn.Flatten(), nn.Linear(108, 5)).double()
    synchronize(model)
    with pytest.raises(UsageError, match="0 is called twice"):
        WholeStep(model).prepare(CUT, make_loss(model))
    assert layer.mode is None


def test_one_micro_batch_is_held_at_a_time():
    model = build("plain")
    synchronize(model)
    alive, num_alive, loss = weakref.WeakSet(), [], make_loss(model)
    model[3].register_forward_hook(lambda module, inputs, output: alive.add(output))

    def watched(micro_batch):
        num_alive.append(len(alive))
        return loss(micro_batch)

    whole = WholeStep(model)
    whole.prepare(CUT, watched)
    assert len(num_alive) == 3 * sum(passes(whole))
    assert max(num_alive) == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_end(bad):
    model = build("plain")
    images, labels = samples()
    images[6] = bad
    whole = take(
        model, lambda micro_batch: F.cross_entropy(model(images[micro_batch]), labels[micro_batch], reduction="sum") / 9
    )
    assert max(passes(whole)) <= 4
    assert not gradients(model).isfinite().all()


def test_autocast_computes_statistics_in_float32():
    model = build("residual", torch.float32)
    plain = make_loss(model, torch.float32)

    def loss(micro_batch):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(micro_batch).float()

    true, _ = one_batch(model, torch.float32)
    theirs = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        make_loss(theirs, torch.float32)(ALL[0]).backward()
    whole = take(model, loss)
    for rounded in (model, theirs):  # of three layers, each of which divides by a deviation
        assert BF16 < miss(gradients(rounded), true) < 32 * BF16
    assert max(passes(whole)) <= 4
    assert whole.layers[0].running_var.dtype == torch.float32
    assert torch.allclose(whole.layers[-1].running_mean, theirs.shortcut[1].running_mean, atol=2e-3)


def test_half_precision_is_summed_in_float32():
    """Means of 20 to five digits, of maps that have less than three."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=1.0))
    x = (torch.randn(9, 3, 40, 40) + 20).bfloat16()
    take(model, lambda micro_batch: model(x[micro_batch]).float().pow(3).mean())
    var, mean = torch.var_mean(x.double(), (0, 2, 3))
    assert torch.allclose(model[0].running_mean.double(), mean, rtol=1e-5)
    assert torch.allclose(model[0].running_var.double(), var, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats_are_kept(dtype):
    model = nn.Sequential(nn.BatchNorm2d(3))
    x = torch.randn(4, 3, 5, 5).to(dtype, memory_format=torch.channels_last).requires_grad_()
    synchronize(model)
    whole, outputs = WholeStep(model), []

    def loss(micro_batch):
        outputs.append(model(x))
        return outputs[-1].float().pow(3).sum()

    whole.prepare(ALL, loss)
    loss(0).backward()
    for y in (*outputs, x.grad):
        assert y.dtype == dtype
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_frozen_layers_keep_their_statistics_and_are_trained():
    model = build("residual")
    make_loss(model)(ALL[0])
    state, expected = copy.deepcopy(model.state_dict()), copy.deepcopy(model).eval()(samples()[0])
    freeze(model)
    assert torch.equal(model.train()(samples()[0]), expected)
    whole = take(model, make_loss(model))
    assert passes(whole) == [0, 0], "synchronize leaves them frozen"
    assert type(model.stem[1]) is FrozenBatchNorm
    assert same_state(model, state)
    assert model.stem[1].weight.grad.any()
    assert model.stem[1].bias.grad.any()


def test_replaced_in_place():
    model = build("plain").eval()
    layer, state = model[1], copy.deepcopy(model.state_dict())
    layer.momentum, layer.eps = 0.3, 0.01
    synchronize(model)
    assert model[1] is layer
    assert (layer.momentum, layer.eps, layer.training, layer.group) == (0.3, 0.01, False, None)
    assert list(model.state_dict()) == list(state)
    copy.deepcopy(model).load_state_dict(state)


def test_other_kinds_are_refused():
    class WithActivation(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    for replace in (synchronize, freeze):
        with pytest.raises(UsageError, match="1 of Sequential"):
            replace(nn.Sequential(nn.Conv2d(3, 3, 1), WithActivation(3)))


@pytest.mark.parametrize("kind", ["plain", "residual"])
def test_deviation_says_how_far_and_leaves_everything(kind):
    model = build(kind)
    synchronize(model)
    loss = make_loss(model)
    true, _ = one_batch(model)
    for micro_batch in CUT:
        loss(micro_batch).backward()
    actual = gradients(model)
    model[1].eval() if kind == "plain" else model.stem.eval()
    modes, state = [module.training for module in model.modules()], copy.deepcopy(model.state_dict())
    assert deviation(model, CUT, loss) == pytest.approx(miss(actual, true), rel=1e-3)
    assert miss(actual, true) > 0.01
    assert deviation(model, ALL, loss) < 1e-12
    with pytest.raises(ZeroDivisionError):
        deviation(model, CUT, lambda micro_batch: loss(micro_batch) / (1 if micro_batch.start == 0 else 0 / 0))
    assert torch.equal(gradients(model), actual)
    assert same_state(model, state)
    assert [module.training for module in model.modules()] == modes
