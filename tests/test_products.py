"""Products by oneDNN are torch's, to rounding, and nothing stays when it is given up."""

import itertools
from functools import partial

import pytest
import torch
from common import metrics
from compare import parameters, relative
from torch import nn

from samestep.models import cpu_matmul as products
from samestep.training import kernels

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch is built without oneDNN"
)
SHAPES = [(64, 33, 17), (5, 1, 3), (1, 7, 2), (3, 4, 1), (1, 1, 1), (0, 3, 2), (3, 0, 2), (3, 2, 0)]


def layouts(number_of_rows: int, number_of_columns: int) -> list[torch.Tensor]:
    """Make matrices stored by rows, by columns, in part of a larger one, and as one repeated row."""
    rows = torch.randn(number_of_rows, number_of_columns)
    columns = torch.randn(number_of_columns, number_of_rows).t()
    part = torch.randn(number_of_rows, 2 * number_of_columns + 2)[:, 1 : number_of_columns + 1]
    return [rows, columns, part, torch.randn(1, number_of_columns).expand(number_of_rows, -1)]


def all_products() -> list[torch.Tensor]:
    torch.manual_seed(0)
    parts = []
    for m, k, n in SHAPES:
        for a, b in itertools.product(layouts(m, k), layouts(k, n)):
            parts += [a @ b, torch.addmm(torch.randn(m, n), a, b), torch.addmm(torch.randn(n), a, b, beta=0.5)]
            parts += [torch.addmm(torch.randn(size), a, b) for size in (n, 1)] + [
                torch.addmm(torch.randn(n), a, b, alpha=2)
            ]
            parts += [torch.addmm(torch.randn(2 * n)[::2], a, b), torch.addmm(torch.randn(m, 1), a, b)]
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        parts += [torch.addmm(*(torch.ones(3, 3, dtype=dtype) * number for number in (1, 2, 3)))]
    layer, x = nn.Linear(8, 4), torch.randn(2, 3, 8, requires_grad=True)
    layer(x).square().sum().backward()
    return [*parts, torch.arange(6).view(2, 3) @ torch.arange(6).view(3, 2), x.grad, layer.weight.grad, layer.bias.grad]


def by_onednn(compute) -> int:
    """Count how many products of a computation oneDNN computes."""
    with torch.profiler.profile() as profile:
        compute()
    return sum(event.name == "mkldnn::_linear_pointwise" for event in profile.events())


def test_products_are_the_same():
    expected = all_products()
    products.use(products.ONEDNN)
    for a, b in zip(all_products(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_forward_and_gradient_of_inputs_are_by_onednn_until_it_is_given_up():
    layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2, bias=False))
    x = torch.randn(3, 8, requires_grad=True)

    def compute():
        layers(x).square().sum().backward()

    assert by_onednn(compute) == 0
    for _ in range(2):
        products.use(products.ONEDNN)
        products.use(products.ONEDNN)
        assert by_onednn(compute) == 4
        products.use(None)
        assert by_onednn(compute) == 0


def test_what_would_have_to_be_copied_stays_with_torch():
    """Left factors that do not lie by rows, and right ones that lie neither by rows nor by columns."""
    products.use(products.ONEDNN)
    choices = [[by_onednn(partial(torch.mm, a, b)) for b in layouts(5, 7)] for a in layouts(4, 5)]
    assert choices == [[1, 1, 0, 0], [0] * 4, [0] * 4, [0] * 4]


@pytest.mark.parametrize("shapes", [((2, 3), (4, 5)), ((2, 3), (3,)), ((0, 3), (4, 0))])
def test_what_cannot_be_multiplied_is_refused_in_torchs_words(shapes):
    messages = []
    for library in (None, products.ONEDNN):
        products.use(library)
        with pytest.raises(RuntimeError) as caught:
            torch.mm(*(torch.ones(shape) for shape in shapes))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("device", "precision", "dtype", "offered"),
    [
        ("cpu", "no", torch.float32, True),
        ("cpu", "bf16", torch.float32, False),
        ("cpu", "no", torch.float64, False),
        ("cuda", "no", torch.float32, False),
    ],
)
def test_offered_for_float32_on_a_cpu(device, precision, dtype, offered):
    calls = []
    ways = {"first": lambda: calls.append("first"), "second": lambda: calls.append("second")}
    candidates = products.add_onednn(ways, nn.Linear(2, 2).to(dtype), torch.device(device), precision)
    assert list(candidates) == [*ways, *(f"{name}, oneDNN" for name in ways if offered)]
    for take in candidates.values():
        take()
    assert calls == [*ways] * (2 if offered else 1)


@pytest.mark.parametrize("program", ["pretrain_bert", "pretrain_gpt2", "finetune_classifier"])
def test_a_program_takes_the_same_steps(train, monkeypatch, capsys, program):
    """Whatever is measured, the last way is the fastest."""
    monkeypatch.setattr(kernels, "measure", lambda _, ways: {name: -float(place) for place, name in enumerate(ways)})
    flags = "--global_batch_size 8 --per_device_train_batch_size 4 --max_train_steps 4"
    safe = train("safe", flags, program=program)
    assert products._replacements is None
    auto = train("auto", f"{flags} --speed auto", program=program)
    assert ", oneDNN (--speed auto)" in capsys.readouterr().out
    assert products._replacements is not None
    losses = [line["loss"] for line in metrics(safe)]
    assert [line["loss"] for line in metrics(auto)] == pytest.approx(losses, rel=1e-5)
    assert relative(parameters(auto, ""), parameters(safe, "")) < 1e-4
