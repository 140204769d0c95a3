"""Dropout by sample: the same for every cut, and as good as noise."""

import copy
import hashlib
import itertools
import json
import math
import pickle

import pytest
import torch
from accelerate import Accelerator
from common import ROOT, fresh_accelerator, load_benchmark
from torch import nn
from torch.utils.checkpoint import checkpoint

from samestep import exact_steps, noise_by_sample
from samestep.errors import UsageError
from samestep.step import noise as noise_module
from samestep.step.noise import ROUND_2, Dropout, Noise, _keep_at_once, mix, signed

CPU = torch.device("cpu")


def mask(seed=0, epoch=0, samples=range(100), places=50, features=200, p=0.1, name="layer"):
    """float [samples, places, features]: 1 where a number is kept."""
    noise = Noise(seed)
    noise.set_samples([(epoch, sample) for sample in samples])
    dropout = Dropout(p, noise, name).train()
    return (dropout(torch.ones(len(samples), places, features)) > 0).float()


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rate_and_expectation(p, dtype):
    """10^6 numbers: the share that is kept is 1 - p within 4 standard errors, and the mean is that of x."""
    noise = Noise(1)
    dropout = Dropout(p, noise, "x").train()
    y = dropout(torch.ones(1000, 1000, dtype=dtype))
    assert y.dtype == dtype
    p = p if p > 2**-17 else 0.0  # rounded to a multiple of 2^-16
    assert (y > 0).float().mean().item() == pytest.approx(1 - p, abs=4 * math.sqrt(p * (1 - p) / 1e6) + 2**-17)
    if p < 1:
        rounding = 0 if dtype == torch.float32 else 2**-8
        assert y.float().mean().item() == pytest.approx(1, abs=4 * math.sqrt(p / (1 - p) / 1e6) + rounding)
        assert len(y.unique()) == 1 + (p > 0)
    dropout.eval()
    x = torch.rand(3, 2)
    assert torch.equal(dropout(x), x)


def test_neighbours_are_independent():
    """Correlations of the masks of neighbouring features, places, samples, epochs, seeds, modules: of 10^6 numbers each, below
    4 standard errors."""
    first, p = mask(), 0.1
    others = {
        "feature": (first[..., 1:], first[..., :-1]),
        "pair": (first[..., ::2], first[..., 1::2]),
        "place": (first[:, 1:], first[:, :-1]),
        "sample": (first[1:], first[:-1]),
        "sample and place": (first[1:, 1:], first[:-1, :-1]),
        "epoch": (mask(epoch=1), first),
        "seed": (mask(seed=1), first),
        "module": (mask(name="layer.1"), first),
        "place 128": (mask(places=200)[:, 128:178], first),
    }
    for name, (x, y) in others.items():
        correlation = ((x - 1 + p) * (y - 1 + p)).mean().item() / (p * (1 - p))
        assert abs(correlation) < 4 / math.sqrt(x.numel()), name


def one_round(first, second, columns, shift):
    x = ((first ^ columns) + second) * signed(ROUND_2, 32)
    return x ^ shift(x, 16)


BAD = {
    "a hash of one round": (noise_module, "_hash", one_round, "all pairs: features, largest"),
    "columns that are not of the module": (
        *(Dropout, "_column_keys", lambda self, x: torch.arange((x.shape[-1] + 1) // 2, dtype=torch.int32)),
        "masks: layer, p = 0.1",
    ),
    "epochs that are added to samples": (
        *(Noise, "_make_keys", lambda self, samples, device: mix(self.seed + torch.tensor(samples).sum(1))),
        "pairs: epoch + 1, sample - 1",
    ),
}


@pytest.mark.parametrize("bad", [None, *BAD])
def test_the_statistics_of_the_benchmark_on_10_6_draws(monkeypatch, bad):
    """66 tests of good noise, none of which fails; and noise of three mistakes, each of which one of them finds."""
    benchmark = load_benchmark("noise")
    if bad is not None:
        monkeypatch.setattr(*BAD[bad][:3])
    failures = benchmark.find_failures(benchmark.run_tests(num_samples=20, places=50, block=20, sequence=2**16))
    assert (BAD[bad][3] in failures) if bad else not failures


def test_the_rule_holds_for_10_8_draws():
    benchmark = load_benchmark("noise")
    results = json.loads((ROOT / "benchmarks" / "results" / "noise.json").read_text())["statistics"]
    assert results["num_draws"] == 10**8
    assert len(results["z"]) == 66
    assert not benchmark.find_failures(results["z"])


def test_draws_are_uniform_and_pairs_of_draws_too():
    """Chi-square of the 4 bits that decide at p = 1/16, 2/16, ... and of neighbours' pairs of them."""
    noise = Noise(3)
    noise.set_samples([(0, sample) for sample in range(200)])
    x = torch.ones(200, 20, 100)
    kept = [Dropout(number / 16, noise, "x").train()(x) > 0 for number in range(1, 16)]
    level = torch.stack(kept).sum(0)  # 0 to 15
    for pairs in (
        level[..., 1:] * 16 + level[..., :-1],
        level[:, 1:] * 16 + level[:, :-1],
        level[1:] * 16 + level[:-1],
    ):
        counts = pairs.flatten().bincount(minlength=256).double()
        chi_square = ((counts - counts.mean()).square() / counts.mean()).sum().item()
        assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)


def test_noise_is_a_function_of_the_sample():
    """Not of the order, of the other samples, of padding, of rows beside it; and golden: it does not change with versions."""
    whole = mask(samples=[5, 2, 7], places=6)
    assert torch.equal(mask(samples=[7, 5], places=9)[:, :6], whole[[2, 0]])
    assert not torch.equal(mask(samples=[5], epoch=1, places=6)[0], whole[0])
    assert hashlib.sha256(whole.bool().numpy().tobytes()).hexdigest()[:16] == "307d3efd91212a1c"
    # Samples end to end, [1, rows, features], and a row for each sample
    noise = Noise(0)
    noise.set_samples([(0, 5), (0, 7)])
    sample, place = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 1, 0, 1, 2, 0])
    noise.set_rows((1, 6), sample, place, 2)
    dropout = Dropout(0.1, noise, "layer").train()
    row = (dropout(torch.ones(1, 6, 200)) > 0).float()[0]
    assert torch.equal(row[:5], torch.cat([whole[0, :2], whole[2, :3]]))
    assert torch.equal((dropout(torch.ones(2, 200)) > 0).float(), whole[[0, 2], 0])
    ones = torch.ones(2)  # a number for each sample
    assert torch.equal(dropout(ones), dropout(ones[:, None])[:, 0])


def test_gradient_and_recomputation():
    noise = Noise(0)
    dropout = Dropout(0.3, noise, "x").train()
    x = torch.randn(4, 5, 7, dtype=torch.float64, requires_grad=True)  # an odd number of features
    assert torch.autograd.gradcheck(dropout, x)
    assert torch.autograd.gradgradcheck(dropout, x)
    y = x.detach().bfloat16().requires_grad_()
    (gradient,) = torch.autograd.grad(dropout(y).float().square().sum() / 2, y, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), y)
    assert second.unique().tolist() == pytest.approx([0, dropout.scale**2], rel=1e-2)
    (plain,) = torch.autograd.grad(dropout(x).square().sum(), x)
    (recomputed,) = torch.autograd.grad(checkpoint(dropout, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(plain, recomputed)
    assert torch.equal(plain == 0, dropout(torch.ones_like(x)) == 0)
    strided = x.detach().transpose(0, 1)
    noise.set_rows((5, 4), torch.zeros(20, dtype=torch.int64), torch.arange(20), 1)
    assert torch.equal(dropout(strided), dropout(strided.contiguous()))


@pytest.mark.parametrize("features", [7, 200])
def test_the_kernel_of_gpus_drops_the_same_numbers(features):
    noise = Noise(0)
    dropout, x = Dropout(0.3, noise, "x").train(), torch.randn(40, features)
    keys = noise.row_keys(x.shape[:-1], x.device)
    at_once = _keep_at_once(
        x, keys.view(torch.int32).view(-1, 2), dropout._column_keys(x), dropout.threshold, dropout.scale
    )
    assert torch.equal(at_once, dropout(x))


@pytest.mark.parametrize("num_rows", [50, noise_module.CHUNK // 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_backward_takes_the_bits_of_the_forward(dtype, num_rows):
    """Of an odd number of features, in parts and at once; also infinite numbers and zeros of both signs."""
    noise = Noise(0)
    dropout = Dropout(0.3, noise, "x").train()
    x = torch.randn(num_rows, 7).to(dtype)
    x[:4, 0] = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    x.requires_grad_()
    kept = dropout(torch.ones(num_rows, 7)) > 0
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = dropout(x)
    assert [(tensor.dtype, tensor.numel()) for tensor in saved] == [(torch.uint8, -(-num_rows * 7 // 8))]
    noise.set_samples([(9, sample) for sample in range(num_rows)])  # by which others would be dropped
    (gradient,) = torch.autograd.grad(y, x, x.detach())
    dropped = x.detach() * 0 if dtype != torch.bfloat16 else torch.zeros_like(x)  # 16 bits are dropped as bits
    expected = torch.where(kept, x.detach() * dropout.scale, dropped * dropout.scale)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    for result in (y, gradient):
        is_number = ~expected.isnan()
        assert torch.equal(result.isnan(), ~is_number)
        assert torch.equal(result.detach().view(bits)[is_number], expected.view(bits)[is_number])


def test_rows_last_as_long_as_their_micro_batch_also_in_rehearsals():
    """A classifier's dropout of one row per sample comes before the layers are computed again."""
    noise = Noise(0)
    dropout = Dropout(0.5, noise, "x").train()
    noise.set_rows((1, 3), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), 2)
    first = dropout(torch.ones(1, 3, 50))
    dropout(torch.ones(2, 50))
    assert torch.equal(dropout(torch.ones(1, 3, 50)), first)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 8), nn.Dropout(0.4))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))[:, 0]


@pytest.fixture
def accelerator():
    fresh_accelerator()
    yield Accelerator(cpu=True)
    fresh_accelerator()


def test_steps_with_dropout_are_those_of_whole_batches(accelerator):
    """float64: to rounding; with torch's own dropout they are not."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(26)]

    def train(per_device_batch_size, is_by_sample):
        torch.manual_seed(0)
        model = Reader().double()
        noise = noise_by_sample(model, seed=1) if is_by_sample else None
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        steps = exact_steps(
            accelerator,
            data,
            torch.stack,
            global_batch_size=10,
            targets=len,
            num_steps=4,
            noise=noise,
            per_device_batch_size=per_device_batch_size,
        )
        for step in steps:
            for batch in step:
                with accelerator.accumulate(model):
                    accelerator.backward(step.loss((model(batch) - batch.mean((1, 2))).square().sum()))
                    optimizer.step()
                    optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    whole = train(10, True)
    for size in (1, 3):
        assert torch.allclose(train(size, True), whole, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(train(3, False), train(10, False), rtol=1e-3)


def test_only_torchs_own_dropout_is_replaced():
    model = nn.ModuleDict({"a": nn.Dropout(0.1), "b": nn.Dropout2d(0.1), "c": nn.Sequential(nn.Dropout(0.2)).eval()})
    noise = noise_by_sample(model, 0)
    assert isinstance(model["a"], Dropout)
    assert model["a"].training
    assert type(model["b"]) is nn.Dropout2d
    assert (model["c"][0].p, model["c"][0].training) == (0.2, False)
    assert model["a"].noise is model["c"][0].noise is noise
    assert not model.state_dict()
    assert repr(model["a"]) == "Dropout(p=0.1, inplace=False)"
    numbers = {Dropout(0.1, noise, "".join(name)).number for name in itertools.product("abc", repeat=4)}
    assert len(numbers) == 81


def test_what_is_left_to_torch_is_named(accelerator, capsys):
    class Own(nn.Dropout):
        pass

    model = nn.ModuleDict({"a": nn.Dropout(0.1), "b": nn.Dropout2d(0.1), "c": nn.AlphaDropout(0.0), "d": Own(0.2)})
    model["e"] = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1)
    model["f"] = nn.LSTM(2, 2, num_layers=2, dropout=0.1)
    left = ["b (Dropout2d)", "d (Own)", "e.self_attn (MultiheadAttention)", "f (LSTM)"]
    noise = noise_by_sample(model, 0)
    assert noise.left == left
    sizes = {"global_batch_size": 2, "per_device_batch_size": 2, "targets": len, "num_steps": 1}
    exact_steps(accelerator, list(range(4)), torch.tensor, noise=noise, **sizes)
    assert capsys.readouterr().out.startswith(
        "dropout of b (Dropout2d), d (Own), e.self_attn (MultiheadAttention), f (LSTM): "
    )
    exact_steps(accelerator, list(range(4)), torch.tensor, noise=noise_by_sample(nn.Tanh(), 0), **sizes)
    assert not capsys.readouterr().out
    assert noise_by_sample(nn.Dropout(0.1), 0).left == ["Dropout"]


def test_dropout_of_adapters_is_by_sample_too():
    """peft's `lora_dropout` in a GPT-2 whose dropouts had a noise before: the summed loss of 6 samples is that of 2 + 4."""
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.3, embd_pdrop=0.3, use_cache=False))
    noise_by_sample(gpt2, seed=0)
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], lora_dropout=0.5, init_lora_weights=False, fan_in_fan_out=True
    )
    model = peft.get_peft_model(gpt2, config).double().train()
    noise = noise_by_sample(model, seed=0)
    dropouts = {name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p}
    assert sum("lora_dropout.default" in name for name in dropouts) == 2
    assert all(isinstance(module, Dropout) and module.noise is noise for module in dropouts.values())
    ids = torch.randint(50, (6, 16))

    def gradient(*samples):
        noise.set_samples([(0, sample) for sample in samples])
        model(input_ids=ids[list(samples)]).logits.square().sum().backward()

    def flat_gradient():
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        model.zero_grad()
        return flat

    gradient(0, 1, 2, 3, 4, 5)
    whole = flat_gradient()
    gradient(5, 1)
    gradient(0, 2, 3, 4)
    assert torch.allclose(flat_gradient(), whole, rtol=1e-6, atol=1e-6 * whole.abs().max())


def test_copies_share_the_samples_and_pickles_hold_none():
    noise = Noise(0)
    dropout = Dropout(0.5, noise, "x").train()
    twin = copy.deepcopy(dropout)
    noise.set_samples([(0, 3), (1, 8)])
    x = torch.ones(2, 5, 40)
    assert torch.equal(twin(x), dropout(x))
    again = pickle.loads(pickle.dumps(dropout))
    assert again.noise.samples is None
    again.noise.set_samples([(0, 3), (1, 8)])
    assert torch.equal(again(x), dropout(x))
    with pytest.raises(UsageError, match=r"a tensor of 1 sample\(s\), but set_samples said 2"):
        dropout(x[:1])
