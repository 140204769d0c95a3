"""Convolutional networks on paper against the real ones: parameters, FLOPs, what the forward saves, the peak."""

import dataclasses
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import ResNetConfig, ResNetForImageClassification

from samestep.models.networks import CaptchaReader
from samestep.models.resnet import GroupNormResNet, GroupNormResNetConfig
from samestep.recipe.catalog import catalog_names, load
from samestep.recipe.tasks.images import ImageRecipe
from stepplan.convnet import ConvNet
from stepplan.memory import model_from_recipe

IMAGES = [name for name in catalog_names() if isinstance(load(name), ImageRecipe)]
SMALL = {
    "basic": {"layer_type": "basic", "embedding_size": 8, "hidden_sizes": (8, 16, 24), "depths": (1, 2, 1)},
    "alike": {"layer_type": "basic", "embedding_size": 8, "hidden_sizes": (8, 8), "depths": (1, 1)},
    "bottleneck": {"layer_type": "bottleneck", "embedding_size": 8, "hidden_sizes": (16, 32), "depths": (2, 1)},
}
CAPTCHA = {"conv_channels": (8, 12, 16), "hidden_size": 24, "image_height": 25, "image_width": 50, "alphabet": "abc"}


def small(kind: str, **changes) -> ImageRecipe:
    if kind == "captcha":
        return load("captcha_3xa100", CAPTCHA | changes)
    return load("resnet50_1xv100", SMALL[kind] | {"image_height": 61, "image_width": 70, "num_labels": 5} | changes)


def build(recipe: ImageRecipe) -> torch.nn.Module:
    if recipe.task == "captcha_recognition":
        return CaptchaReader(**recipe.architecture)
    if recipe.normalization == "group":
        return GroupNormResNet(GroupNormResNetConfig(**recipe.architecture))
    return ResNetForImageClassification(ResNetConfig(**recipe.architecture))


def images(recipe: ImageRecipe, num_samples: int = 3) -> torch.Tensor:
    return torch.randn(num_samples, recipe.num_channels, recipe.image_height, recipe.image_width)


def logits(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output = model(batch)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("name", IMAGES)
def test_parameters_are_the_real_models(name):
    with torch.device("meta"):
        model = build(load(name))
    assert model_from_recipe(load(name)).num_parameters == sum(p.numel() for p in model.parameters())


def test_published_sizes():
    network = model_from_recipe(load("resnet50_1xv100"))
    assert network.num_parameters == 25_557_032
    assert [round(network.saved_bytes(autocast=autocast) / 1e6, 1) for autocast in (False, True)] == [85.9, 43.8]
    first = (
        2 * 3 * 64 * 49 * 112 * 112
    )  # the first convolution has no gradient of its input; published counts ignore that
    assert (network.flops_per_sample + first) / 1e9 == pytest.approx(24.5, abs=0.05)


@pytest.mark.parametrize("kind", [*SMALL, "captcha"])
def test_parameters_and_flops_are_those_that_torch_counts(kind):
    recipe = small(kind)
    model, shape = build(recipe), model_from_recipe(recipe)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        logits(model, images(recipe)).sum().backward()
    assert counter.get_total_flops() == 3 * shape.flops_per_sample


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [*SMALL, "captcha"])
def test_what_the_forward_saves(kind, autocast):
    """Bytes of distinct storages, of 6 images less those of 3; left over are the layers after the last convolution."""

    def saved(num_samples: int) -> int:
        model, storages = build(recipe), {}
        addresses = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}

        def pack(tensor):
            if tensor.untyped_storage().data_ptr() not in addresses:
                storages[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that no address comes twice
            return tensor

        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            output = logits(model, images(recipe, num_samples))
        assert output.requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    recipe = small(kind, normalization="batch")
    measured = (saved(6) - saved(3)) / 3
    expected = model_from_recipe(recipe).saved_bytes(autocast=autocast)
    assert expected <= measured <= 1.02 * expected


def test_group_normalisation_keeps_float32_under_autocast():
    batch, group = (model_from_recipe(small("captcha", normalization=kind)) for kind in ("batch", "group"))
    assert batch.num_parameters == group.num_parameters
    assert batch.saved_bytes(autocast=False) == group.saved_bytes(autocast=False)
    assert batch.saved_bytes(autocast=True) < group.saved_bytes(autocast=True) <= group.saved_bytes(autocast=False)


def test_a_step_of_the_captcha_reader_by_hand():
    network = model_from_recipe(load("captcha_3xa100", {"conv_channels": (64,), "hidden_size": 8}))
    e, pooled = 64 * 60 * 160, 64 * 30 * 80
    saved = 4 * 3 * 60 * 160 + 4 * (2 * e + pooled) + 8 * pooled
    assert network.saved_bytes(autocast=False) == saved
    forward, backward = network.peaks(10, autocast=False, gradient_checkpointing=False)
    assert forward == (0, 10 * saved, 0, 0)
    assert backward == (0, 10 * (saved + 4 * 2 * e) + 4 * 9 * 3 * 64, 0, 0)
    wide = model_from_recipe(load("captcha_3xa100", {"conv_channels": (64,), "hidden_size": 16}))
    alone = wide.peaks(1, autocast=False, gradient_checkpointing=False)[1]
    assert alone.activations == saved + 4 * pooled * 16 > saved + 4 * 2 * e
    assert (
        network.peaks(10, autocast=True, gradient_checkpointing=False)[0].autocast_cache == 2 * network.num_parameters
    )
    with pytest.raises(ValueError, match="not recomputed"):
        network.peaks(1, autocast=False, gradient_checkpointing=True)


def test_the_reader_reads_each_character():
    recipe = small("captcha")
    model = CaptchaReader(**recipe.architecture)
    assert logits(model, images(recipe)).shape == (3, 4, 3)
    assert isinstance(model_from_recipe(recipe), ConvNet)
    assert [type(module).__name__ for module in model.features[:4]] == ["Conv2d", "GroupNorm", "ReLU", "MaxPool2d"]
    assert model.features[1].num_groups == 8  # of 8 channels
    assert model.features[5].num_groups == 12
    make = partial(dataclasses.replace, recipe)
    assert type(CaptchaReader(**make(normalization="batch").architecture).features[1]).__name__ == "BatchNorm2d"


def test_with_group_normalisation_samples_do_not_see_each_other():
    batch_normalized, recipe = small("bottleneck"), small("bottleneck", normalization="group")
    model, batch = build(batch_normalized), images(recipe, 4)
    assert not torch.allclose(logits(model, batch)[:2], logits(model, batch[:2]), rtol=1e-3)
    model = build(recipe)
    kinds = {type(module).__name__ for module in model.modules() if "Norm2d" in type(module).__name__}
    assert not kinds
    assert torch.allclose(logits(model, batch)[:2], logits(model, batch[:2]), rtol=1e-4, atol=1e-6)
    assert sum(p.numel() for p in model.parameters()) == model_from_recipe(recipe).num_parameters
