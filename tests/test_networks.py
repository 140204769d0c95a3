"""Networks of our own: group normalisation beside torch's, and what a reader reads."""

import pytest
import torch
from torch import nn

from samestep.models import networks
from samestep.models.networks import CaptchaReader, GroupNorm, lay_out
from samestep.recipe.catalog import load

SMALL = {"num_train_samples": 16, "conv_channels": [4, 8, 8, 8], "hidden_size": 16}


def outcome(norm: nn.GroupNorm, images: torch.Tensor, d_output: torch.Tensor) -> list[torch.Tensor]:
    """Compute output and gradients of input, weight and bias."""
    images = images.clone(memory_format=torch.preserve_format).requires_grad_()
    output = norm(images)
    return [output.detach(), *torch.autograd.grad(output, [images, norm.weight, norm.bias], d_output)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 6, 4, 7), (2, 6, 1, 3), (2, 6, 1, 1), (0, 6, 4, 7)])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_group_normalisation_is_torchs(memory_format, shape, dtype):
    """The same numbers, in the memory format that comes in, and gradients likewise."""
    torch.manual_seed(0)
    images, d_output = (torch.randn(shape).to(dtype).contiguous(memory_format=memory_format) for _ in range(2))
    ours, theirs = GroupNorm(3, 6).to(dtype), nn.GroupNorm(3, 6).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    actual, expected = outcome(ours, images, d_output), outcome(theirs, images.contiguous(), d_output.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert actual[0].is_contiguous(memory_format=memory_format) or not len(images)
    assert actual[0].dtype == dtype


def test_memory_format():
    formats = {
        (kind, precision): networks.memory_format(torch.device(kind), precision)
        for kind in ("cpu", "cuda")
        for precision in ("no", "bf16")
    }
    first = [name for name, memory_format in formats.items() if memory_format == torch.contiguous_format]
    assert first == [("cpu", "no")]


@pytest.mark.parametrize("normalization", ["group", "batch"])
def test_a_model_in_channels_last_is_the_same_model(normalization):
    reader = CaptchaReader(**load("captcha_cpu", SMALL | {"normalization": normalization}).architecture).double()
    images = torch.randn(3, 3, 60, 160, dtype=torch.float64)
    output, names = reader(images), list(reader.state_dict())
    lay_out(reader, torch.channels_last)
    assert reader.features[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert any(type(module) is GroupNorm for module in reader.modules()) == (normalization == "group")
    assert list(reader.state_dict()) == names
    assert torch.allclose(reader(images.contiguous(memory_format=torch.channels_last)), output, rtol=1e-12)


def test_a_reader_is_saved_and_loaded(tmp_path):
    reader = CaptchaReader(**load("captcha_cpu", SMALL).architecture).eval()
    reader.save_pretrained(tmp_path)
    again = CaptchaReader.from_pretrained(tmp_path).eval()
    images = torch.randint(256, (5, 60, 160, 3), dtype=torch.uint8)
    assert again.read(images) == reader.read(images)
    assert reader.texts(torch.tensor([[0, 9], [3, 1]])) == ["09", "31"]


def test_pixel_values():
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(1, 1, 1, 3).expand(1, 2, 4, 3)
    values = networks.pixel_values(images)
    assert values.shape == (1, 3, 2, 4)
    assert values[0, :, 1, 3].tolist() == pytest.approx([-1, 1, -0.6])
