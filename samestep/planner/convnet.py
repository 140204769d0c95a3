"""The shape of a convolutional network: its parameters, what an image computes, the memory of a forward and its backward.

Arithmetic only. An element is one number of an activation, for one image. ResNets are transformers' (He et al., Deep Residual
Learning for Image Recognition, 2015, arXiv:1512.03385); the captcha reader is `networks.CaptchaReader`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from samestep.planner.transformer import Moment


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution without bias, its normalisation, and what follows, by elements per image.

    Attributes:
        num_weights: of the convolution.
        channels: of its output.
        pixels: of its output.
        relu: elements of the relu that follows, 0 where none does. After a residual sum it belongs to its last convolution.
        pooled: elements of the maximum that follows, 0 where none does.
        shared: elements of its input where another convolution has the same, 0 elsewhere.
    """

    num_weights: int
    channels: int
    pixels: int
    relu: int
    pooled: int = 0
    shared: int = 0

    @property
    def elements(self) -> int:
        """Of its output."""
        return self.channels * self.pixels

    def saved_bytes(self, width: int, *, grouped: bool) -> int:
        """Bytes that it saves for its backward, beyond its input, in elements of `width` bytes.

        The normalisation keeps the convolution's output, relu its own, the maximum the place of each (8 bytes) and its output
        is what comes next. Group normalisation computes in float32 under autocast: it keeps a cast of its input (4), relu its
        output in float32 (4), and each of the next convolutions a cast of what arrives there (2).
        """
        if grouped and width == 2:
            casts = 2 * (self.pooled or self.relu) + 2 * self.shared
            return 4 * (self.elements + self.relu) + casts + 8 * self.pooled
        return width * (self.elements + self.relu + self.pooled) + 8 * self.pooled


@dataclasses.dataclass(frozen=True)
class ConvNet:
    """Convolutions with normalisation, then fully connected layers.

    Attributes:
        convolutions: in the order of the forward.
        image: elements of the input.
        connected: widths of the fully connected layers, from their input to the logits.
        grouped: group normalisation instead of batch normalisation.
        photographs: whether samples are photographs, to be decoded and cropped.
    """

    convolutions: tuple[Convolution, ...]
    image: int
    connected: tuple[int, ...]
    grouped: bool
    photographs: bool

    unit = "image"
    length = 1
    layered = False  # nothing is recomputed or sharded
    kernels = "channels_last"  # which traffic of timing.CALIBRATION
    kernels_per_layer = 8
    """Kernels of a convolution's forward and backward, with normalisation, relu, sum and casts, counted."""
    num_logits = 0  # a thousand classes are nothing beside the pixels
    eager = False

    @property
    def num_layers(self) -> int:
        """Convolutions."""
        return len(self.convolutions)

    @property
    def num_parameters(self) -> int:
        """Weights, two per channel of a normalisation, the connected layers and their biases."""
        convolved = sum(c.num_weights + 2 * c.channels for c in self.convolutions)
        return convolved + sum((wide + 1) * out for wide, out in zip(self.connected, self.connected[1:], strict=False))

    @property
    def gathered(self) -> int:
        """Parameters that a process of a sharded run gathers at once: all, as no layer is wrapped by itself."""
        return self.num_parameters

    @property
    def flops_per_sample(self) -> int:
        """Of forward and backward, a multiply-add as two. The first convolution has no gradient of its input to compute."""
        products = [c.num_weights * c.pixels for c in self.convolutions]
        products += [wide * out for wide, out in zip(self.connected, self.connected[1:], strict=False)]
        return 6 * sum(products) - 2 * products[0]

    def saved_bytes(self, *, autocast: bool) -> int:
        """Bytes that the forward of an image saves for its backward, and the image itself.

        Under autocast the image's cast is saved, too; not its float32 original, which is counted as the input.
        """
        width = 2 if autocast else 4
        return width * self.image + sum(c.saved_bytes(width, grouped=self.grouped) for c in self.convolutions)

    def moments(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Moment, ...]:
        """What is alive at the end of the forward, and at the fullest moment of the backward.

        In the backward of convolution i its own activations and all before it are alive, two gradients of the size of its
        relu, its output, or its input, and 4 bytes for each of its weights: their gradient, before it is added. In the backward
        of a connected layer all activations are alive, and such a gradient.

        Raises:
            ValueError: gradient_checkpointing, which these networks do not have.
        """
        if gradient_checkpointing:
            raise ValueError("convolutional networks are not recomputed")
        width = 2 if autocast else 4
        cache = width * self.num_parameters if autocast else 0
        alive, fullest, wide = num_samples * width * self.image, 0, 4 if self.grouped else width
        for c in self.convolutions:
            alive += num_samples * c.saved_bytes(width, grouped=self.grouped)
            gradients = num_samples * wide * (c.elements + max(c.relu, c.elements)) + 4 * c.num_weights
            fullest = max(fullest, alive + gradients)
        connected = [wide * out for wide, out in zip(self.connected, self.connected[1:], strict=False)]
        return Moment(cache, alive, 0), Moment(cache, max(fullest, alive + 4 * max(connected)), 0)


def resnet(shape: Mapping[str, Any], height: int, width: int, *, grouped: bool = False) -> ConvNet:
    """ResNet for images of height x width pixels.

    Args:
        shape: as `transformers.ResNetConfig` takes it.

    >>> shape = {"num_channels": 3, "num_labels": 1000, "layer_type": "bottleneck", "embedding_size": 64}
    >>> shape |= {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3]}
    >>> network = resnet(shape, 224, 224)
    >>> network.num_parameters, round(network.flops_per_sample / 1e9, 1)
    (25557032, 24.3)
    >>> [round(network.saved_bytes(autocast=on) / 1e6, 1) for on in (False, True)]
    [85.9, 43.8]
    """

    def halved(size: tuple[int, int]) -> tuple[int, int]:
        return -(-size[0] // 2), -(-size[1] // 2)

    embedding, size = shape["embedding_size"], halved((height, width))
    pooled = halved(size)
    first = size[0] * size[1]
    weights = 49 * shape["num_channels"] * embedding
    layers = [Convolution(weights, embedding, first, embedding * first, embedding * pooled[0] * pooled[1])]
    size, channels = pooled, embedding
    for stage, (out, depth) in enumerate(zip(shape["hidden_sizes"], shape["depths"], strict=True)):
        for block in range(depth):
            stride = 2 if block == 0 and stage > 0 else 1
            after = halved(size) if stride == 2 else size
            before, pixels = size[0] * size[1], after[0] * after[1]
            if stride == 2 or channels != out:
                layers.append(Convolution(channels * out, out, pixels, 0, shared=channels * before))
            if shape["layer_type"] == "bottleneck":
                inner = out // 4
                layers.append(Convolution(channels * inner, inner, before, inner * before))
                layers.append(Convolution(9 * inner * inner, inner, pixels, inner * pixels))
                layers.append(Convolution(inner * out, out, pixels, out * pixels))
            else:
                layers.append(Convolution(9 * channels * out, out, pixels, out * pixels))
                layers.append(Convolution(9 * out * out, out, pixels, out * pixels))
            channels, size = out, after
    image = shape["num_channels"] * height * width
    return ConvNet(tuple(layers), image, (channels, shape["num_labels"]), grouped, photographs=True)


def captcha_reader(
    height: int,
    width: int,
    num_channels: int,
    conv_channels: Sequence[int],
    hidden_size: int,
    num_logits: int,
    *,
    grouped: bool,
) -> ConvNet:
    """3x3 convolutions, each with normalisation, relu and a 2x2 maximum; a hidden layer; logits of all characters.

    >>> captcha_reader(60, 160, 3, [64, 128, 256, 512], 1024, 4 * 62, grouped=True).num_parameters
    17535800
    """
    layers, channels, image = [], num_channels, num_channels * height * width
    for out in conv_channels:
        pixels, pooled = height * width, (height // 2) * (width // 2)
        layers.append(Convolution(9 * channels * out, out, pixels, out * pixels, out * pooled))
        channels, height, width = out, height // 2, width // 2
    connected = (channels * height * width, hidden_size, num_logits)
    return ConvNet(tuple(layers), image, connected, grouped, photographs=False)
