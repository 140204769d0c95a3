"""Recurrences in the place of a decoder's attention: their matrices, and the memory and work of a layer.

Letters are those of `stepplan.decoder`. Bytes are what transformers keeps where it computes a recurrence without a package of
kernels of its own: in chunks, by operations of torch. Coefficients were counted from tensors that a layer saves.
"""

from typing import NamedTuple

UNADAPTED = "scan"
"""Source of a matrix that no adapter is on, because a kernel reads its weights past its module."""


class Linear(NamedTuple):
    """A matrix of a layer.

    Attributes:
        name: name of its module.
        width: numbers that come in.
        out: numbers that go out.
        source: what comes in: attention (the normalised input), output (of attention, or of what is in its place), scan,
            feed_forward, down, or a latent vector.
    """

    name: str
    width: int
    out: int
    source: str

    @property
    def size(self) -> int:
        """Number of its weights."""
        return self.width * self.out


class Scan(NamedTuple):
    """Mamba 2's recurrence (2405.21060), computed in chunks.

    Attributes:
        num_heads, head_dim: heads, and numbers of each.
        num_groups: groups of heads that share the matrices into a state and out of it.
        state_size: numbers of a state per number of a head.
        chunk_size: tokens of a chunk.
        kernel_size: tokens that its convolution sees.
        extra: parameters that are no matrices of products: the convolution's, decays, steps, skips, biases.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    chunk_size: int
    kernel_size: int
    extra: int

    @property
    def inner(self) -> int:
        """Numbers per token of all heads."""
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Numbers per token that the convolution takes: its input, and what goes into states and out of them."""
        return self.inner + 2 * self.num_groups * self.state_size

    def linears(self, hidden_size: int) -> list[Linear]:
        """List the matrices of a layer's recurrence."""
        width = self.inner + self.convolved + self.num_heads
        return [
            Linear("in_proj", hidden_size, width, "attention"),
            Linear("out_proj", self.inner, hidden_size, UNADAPTED),
        ]

    def saved_bytes(self, b: int, length: int, is_full: bool) -> int:
        """Count the bytes per token that a layer saves, with b bytes per number of a product.

        The in-projection, the convolution before and after its activation; inputs, outputs and gates of heads; scores of a
        chunk; what goes into states and out of them, repeated for all heads; states of all chunks, and with the first.
        Autocast leaves what is no product in float32. Where all is trained, what skips and a normalisation multiply, too.
        """
        inner, heads, chunk, state = self.inner, self.num_heads, self.chunk_size, self.state_size
        states = b * (2 * -(-length // chunk) + 1) * inner * state // length + 8 * inner * is_full
        if b == 2:
            return states + 26 * inner + 4 * self.convolved + heads * (8 * chunk + 12 * state + 16)
        return states + 28 * inner + 12 * self.convolved + heads * (12 * chunk + 20 * state + 24)

    def temporary_bytes(self, autocast: bool) -> int:
        """Count the bytes per token of gradients on their way: of what heads give back and of their gate."""
        return 8 * self.inner

    def flops(self, length: int) -> float:
        """Count the FLOPs per token of the forward: its convolution, products within chunks, into and out of states.

        Last, transformers multiplies the states of all chunks by a matrix of their decays.
        """
        state, width, chunk = self.state_size, self.head_dim, self.chunk_size
        within = 2 * chunk * (state + width) + 4 * state * width
        between = 2 * (-(-length // chunk) + 1) ** 2 * state * width / length
        return 2 * self.kernel_size * self.convolved + self.num_heads * (within + between)


Recurrence = Scan
