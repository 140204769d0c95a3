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

    def temporary_bytes(self, b: int, length: int, is_full: bool) -> int:
        """Count the bytes per token of gradients on their way, beside all that is saved: of heads, of their states, of chunks.

        They are most when what skips and the normalisation saved is gone. Fitted to traces of one layer, recomputed.
        """
        inner, states = self.inner, self.num_heads * self.state_size
        if b == 2:
            rest = max(14 * inner + 4 * self.num_heads * self.chunk_size, 11 * inner + 12 * states)
            return rest + 4 * self.convolved - 6 * inner * is_full
        return max(20 * inner, 11 * inner + 12 * states) - 8 * inner * is_full

    def flops(self, length: int) -> float:
        """Count the FLOPs per token of the forward: its convolution, products within chunks, into and out of states.

        Last, transformers multiplies the states of all chunks by a matrix of their decays.
        """
        state, width, chunk = self.state_size, self.head_dim, self.chunk_size
        within = 2 * chunk * (state + width) + 4 * state * width
        between = 2 * (-(-length // chunk) + 1) ** 2 * state * width / length
        return 2 * self.kernel_size * self.convolved + self.num_heads * (within + between)


class DeltaRule(NamedTuple):
    """A recurrence by the gated delta rule (2412.06464), of Qwen3-Next and Qwen3.5, computed in chunks of 64 tokens.

    Attributes:
        num_key_heads, key_dim: heads of queries and of keys, repeated for those of values, and numbers of each.
        num_heads, head_dim: heads of values, and numbers of each.
        kernel_size: tokens that its convolution sees.
        is_split: whether gates, steps and decays come from matrices of their own.
        chunk_size: tokens of a chunk.
    """

    num_key_heads: int
    key_dim: int
    num_heads: int
    head_dim: int
    kernel_size: int
    is_split: bool = False
    chunk_size: int = 64

    @property
    def inner(self) -> int:
        """Numbers per token of all heads of values."""
        return self.num_heads * self.head_dim

    @property
    def repeated(self) -> int:
        """Numbers per token of all queries, or of all keys, repeated."""
        return self.num_heads * self.key_dim

    @property
    def convolved(self) -> int:
        """Numbers per token that the convolution takes: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def extra(self) -> int:
        """Parameters that are no matrices of products: the convolution's, a decay and a step per head, a normalisation."""
        return self.convolved * self.kernel_size + 2 * self.num_heads + self.head_dim

    def linears(self, hidden_size: int) -> list[Linear]:
        """List the matrices of a layer's recurrence."""
        heads, inner = self.num_heads, self.inner
        widths = {"in_proj_qkvz": self.convolved + inner, "in_proj_ba": 2 * heads}
        if self.is_split:
            widths = {"in_proj_qkv": self.convolved, "in_proj_z": inner, "in_proj_b": heads, "in_proj_a": heads}
        first = [Linear(name, hidden_size, width, "attention") for name, width in widths.items()]
        return [*first, Linear("out_proj", inner, hidden_size, "output")]

    def saved_bytes(self, b: int, length: int, is_full: bool) -> int:
        """Count the bytes per token that a layer saves, with b bytes per number of a product.

        Scores of chunks, their decays, and the triangular system; queries, keys and values, repeated, scaled, by chunks; the
        convolution before and after; states of all chunks. All is float32 but products under autocast.
        """
        chunk, heads = self.chunk_size * self.num_heads, self.num_heads
        states = 8 * self.repeated * self.head_dim // self.chunk_size
        if b == 2:
            rest = 14 * chunk + 38 * self.repeated + (28 + 2 * is_full) * self.inner
            return states + rest + 4 * self.convolved + 38 * heads
        rest = 20 * chunk + 48 * self.repeated + (28 + 4 * is_full) * self.inner
        return states + rest + 8 * self.convolved + 40 * heads

    def temporary_bytes(self, b: int, length: int, is_full: bool) -> int:
        """Count the bytes per token of gradients on their way, beside all that is saved."""
        return 0

    def flops(self, length: int) -> float:
        """Count the FLOPs per token of the forward: its convolution, products within chunks, into and out of states."""
        keys, width, chunk = self.key_dim, self.head_dim, self.chunk_size
        # Scores of keys with keys and with queries, two triangular systems, the values that are seen
        within = 4 * chunk * keys + chunk * (keys + width) + 2 * chunk * width
        return 2 * self.kernel_size * self.convolved + self.num_heads * (within + 6 * keys * width)


Recurrence = Scan | DeltaRule
