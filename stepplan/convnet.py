"""The shape of a convolutional network: its parameters, the FLOPs of an image, the memory of a forward and its backward.

Arithmetic only. An element is one number of an activation, for one image. ResNets are transformers' (He et al., Deep Residual
Learning for Image Recognition, 2015, arXiv:1512.03385); the captcha reader is `networks.CaptchaReader`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stepplan.transformer import Peak


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution without bias, its normalisation, relu and pooling, by elements per image.

    Attributes:
        num_weights: weights of the convolution.
        channels: channels of its output.
        pixels: pixels of its output.
        relu: elements of the relu that follows, 0 without one. After a residual sum it belongs to the sum's last convolution.
        pool: elements of the maximum pooling that follows, 0 without one.
        shared_input: elements of its input where another convolution has the same input, 0 elsewhere.
    """

    num_weights: int
    channels: int
    pixels: int
    relu: int
    pool: int = 0
    shared_input: int = 0

    @property
    def elements(self) -> int:
        """Elements of the convolution's output."""
        return self.channels * self.pixels

    def saved_bytes(self, width: int, *, group_norm: bool) -> int:
        """Count the bytes that the forward saves for its backward, beyond its input, in elements of `width` bytes.

        The normalisation keeps the convolution's output, relu its own output, the pooling the place of each maximum (8 bytes)
        and its output, which is the next input. Group normalisation computes in float32 under autocast: it keeps a cast of
        its input (4), relu its output in float32 (4), and each of the next convolutions a cast of its input (2).
        """
        if group_norm and width == 2:
            casts = 2 * (self.pool or self.relu) + 2 * self.shared_input
            return 4 * (self.elements + self.relu) + casts + 8 * self.pool
        return width * (self.elements + self.relu + self.pool) + 8 * self.pool


@dataclasses.dataclass(frozen=True)
class ConvNet:
    """Convolutions with normalisation, then fully connected layers.

    Attributes:
        convolutions: in the order of the forward.
        image: elements of the input.
        linear_widths: widths of the fully connected layers, from their input to the logits.
        group_norm: group normalisation instead of batch normalisation.
        has_photographs: whether samples are photographs, to be decoded and cropped.
    """

    convolutions: tuple[Convolution, ...]
    image: int
    linear_widths: tuple[int, ...]
    group_norm: bool
    has_photographs: bool

    unit = "image"
    length = 1
    has_equal_layers = False  # nothing is recomputed or sharded
    kernels = "channels_last"  # chooses the traffic of timing.CALIBRATION
    kernels_per_layer = 8
    """Kernels of a convolution's forward and backward, with normalisation, relu, sum and casts, counted."""
    num_logits = 0  # a thousand classes are nothing beside the pixels
    eager_attention = False

    @property
    def num_layers(self) -> int:
        """Number of convolutions."""
        return len(self.convolutions)

    @property
    def num_parameters(self) -> int:
        """N: weights, two per channel of a normalisation, the fully connected layers with their biases."""
        number = sum(c.num_weights + 2 * c.channels for c in self.convolutions)
        return number + sum((n + 1) * m for n, m in zip(self.linear_widths, self.linear_widths[1:], strict=False))

    @property
    def flops_per_sample(self) -> int:
        """FLOPs of forward and backward, a multiply-add as two. The first convolution computes no gradient of its input."""
        matmuls = [c.num_weights * c.pixels for c in self.convolutions]
        matmuls += [n * m for n, m in zip(self.linear_widths, self.linear_widths[1:], strict=False)]
        return 6 * sum(matmuls) - 2 * matmuls[0]

    def saved_bytes(self, *, autocast: bool) -> int:
        """Count the bytes that the forward of an image saves for its backward, and the bytes of the image itself.

        Under autocast that is the image's cast; its float32 original, which nothing saves, is alive as long.
        """
        width = 2 if autocast else 4
        return width * self.image + sum(c.saved_bytes(width, group_norm=self.group_norm) for c in self.convolutions)

    def peaks(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Peak, ...]:
        """Count the bytes at the end of the forward, and at the peak of the backward.

        At the end of the forward of a ResNet its last sum is alive, too, which nothing saves; under autocast always the image
        before its cast. In the backward of convolution i the activations of convolutions 0 to i are alive, two gradients of the
        size of its relu, its output, or its input, and 4 bytes for each of its weights: their gradient, before it is added. In
        the backward of a fully connected layer all activations are alive, and such a gradient of its weights.

        Raises:
            ValueError: gradient_checkpointing, which these networks do not have.
        """
        if gradient_checkpointing:
            raise ValueError("convolutional networks are not recomputed")
        width, cast_bytes = (2, 2) if autocast else (4, 0)
        cache = cast_bytes * self.num_parameters
        alive, fullest, gradient_width = num_samples * (4 + cast_bytes) * self.image, 0, 4 if self.group_norm else width
        for c in self.convolutions:
            alive += num_samples * c.saved_bytes(width, group_norm=self.group_norm)
            gradients = num_samples * gradient_width * (c.elements + max(c.relu, c.elements)) + 4 * c.num_weights
            fullest = max(fullest, alive + gradients)
        largest_linear = max(n * m for n, m in zip(self.linear_widths, self.linear_widths[1:], strict=False))
        last = self.convolutions[-1]
        last_sum = 0 if last.pool else num_samples * gradient_width * last.elements
        return Peak(cache, alive + last_sum, 0), Peak(cache, max(fullest, alive + 4 * largest_linear), 0)


def resnet(shape: Mapping[str, Any], height: int, width: int, *, group_norm: bool = False) -> ConvNet:
    """Return the shape of a ResNet for images of height x width pixels.

    Args:
        shape: as `transformers.ResNetConfig` takes it.
        height, width: pixels of an image.
        group_norm: group normalisation instead of batch normalisation.

    >>> shape = {"num_channels": 3, "num_labels": 1000, "layer_type": "bottleneck", "embedding_size": 64}
    >>> shape |= {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3]}
    >>> network = resnet(shape, 224, 224)
    >>> network.num_parameters, round(network.flops_per_sample / 1e9, 1)
    (25557032, 24.3)
    >>> [round(network.saved_bytes(autocast=on) / 1e6, 1) for on in (False, True)]
    [85.9, 43.8]
    """

    def halve(size: tuple[int, int]) -> tuple[int, int]:
        return -(-size[0] // 2), -(-size[1] // 2)

    # The stem halves height and width twice: a 7x7 convolution of stride 2, then a 3x3 maximum of stride 2
    embedding, size = shape["embedding_size"], halve((height, width))
    pool_size = halve(size)
    pixels = size[0] * size[1]
    weights = 49 * shape["num_channels"] * embedding
    layers = [Convolution(weights, embedding, pixels, embedding * pixels, embedding * pool_size[0] * pool_size[1])]
    size, channels = pool_size, embedding
    for stage, (out_channels, depth) in enumerate(zip(shape["hidden_sizes"], shape["depths"], strict=True)):
        for block in range(depth):
            # The first block of every stage but the first halves [input_pixels] to [pixels], in its 3x3 convolution
            stride = 2 if block == 0 and stage > 0 else 1
            out_size = halve(size) if stride == 2 else size
            input_pixels, pixels = size[0] * size[1], out_size[0] * out_size[1]
            if stride == 2 or channels != out_channels:
                layers.append(
                    Convolution(channels * out_channels, out_channels, pixels, 0, shared_input=channels * input_pixels)
                )
            if shape["layer_type"] == "bottleneck":
                inner = out_channels // 4
                layers.append(Convolution(channels * inner, inner, input_pixels, inner * input_pixels))
                layers.append(Convolution(9 * inner * inner, inner, pixels, inner * pixels))
                layers.append(Convolution(inner * out_channels, out_channels, pixels, out_channels * pixels))
            else:
                layers.append(Convolution(9 * channels * out_channels, out_channels, pixels, out_channels * pixels))
                layers.append(Convolution(9 * out_channels * out_channels, out_channels, pixels, out_channels * pixels))
            channels, size = out_channels, out_size
    image = shape["num_channels"] * height * width
    return ConvNet(tuple(layers), image, (channels, shape["num_labels"]), group_norm, has_photographs=True)


def captcha_reader(
    height: int,
    width: int,
    num_channels: int,
    conv_channels: Sequence[int],
    hidden_size: int,
    num_logits: int,
    *,
    group_norm: bool,
) -> ConvNet:
    """Return the shape of a reader of captchas.

    It has 3x3 convolutions, each with normalisation, relu and a 2x2 maximum; a hidden layer; logits of all characters.

    Args:
        height, width: pixels of an image.
        num_channels: colours of a pixel.
        conv_channels: channels of each convolution.
        hidden_size: width of the hidden layer.
        num_logits: characters of an image x characters of the alphabet.
        group_norm: group normalisation instead of batch normalisation.

    >>> captcha_reader(60, 160, 3, [64, 128, 256, 512], 1024, 4 * 62, group_norm=True).num_parameters
    17535800
    """
    layers, channels, image = [], num_channels, num_channels * height * width
    for out_channels in conv_channels:
        pixels, pooled_pixels = height * width, (height // 2) * (width // 2)
        sizes = pixels, out_channels * pixels, out_channels * pooled_pixels
        layers.append(Convolution(9 * channels * out_channels, out_channels, *sizes))
        channels, height, width = out_channels, height // 2, width // 2
    linear_widths = (channels * height * width, hidden_size, num_logits)
    return ConvNet(tuple(layers), image, linear_widths, group_norm, has_photographs=False)
