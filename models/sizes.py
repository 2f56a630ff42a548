"""The sizes of the byte U-Net, and what they cost.

Letters: T bytes, M tokens, D width, W window.
"""

from dataclasses import dataclass

MLP_RATIO_BYTE, MLP_RATIO_TOKEN = 1, 4


@dataclass(frozen=True, kw_only=True)
class Size:
    """Layout of a byte U-Net. Raises ValueError where it is none."""

    width: int  #: D
    heads: int  #: of every layer; D / heads is even
    encoder: int  #: byte layers before the boundaries
    mid: int  #: token layers
    decoder: int  #: byte layers after them
    window: int  #: W of the byte layers: position t attends to t-W+1 .. t

    def __post_init__(self):
        if min(self.width, self.heads, self.encoder, self.mid, self.decoder, self.window) < 1:
            raise ValueError(f"every number of a size must be at least 1: {self}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be a multiple of twice the {self.heads} heads (rotary positions turn pairs)")


SIZES = {
    "nano": Size(width=128, heads=4, encoder=1, mid=4, decoder=1, window=16),
    "18M": Size(width=384, heads=6, encoder=2, mid=6, decoder=2, window=64),
    "40M": Size(width=512, heads=8, encoder=4, mid=6, decoder=4, window=64),
    "90M": Size(width=768, heads=12, encoder=4, mid=6, decoder=4, window=64),
    "147M": Size(width=768, heads=12, encoder=4, mid=12, decoder=4, window=64),
    # the name that the paper's code gives this layout; counted as the others are, it has 366M parameters
    "346M": Size(width=1024, heads=16, encoder=2, mid=20, decoder=2, window=64),
}


def flops_per_byte(size: Size, rate: float, length: int, samples: float = 1.0) -> float:
    """Floating-point operations of one forward per decoded byte; a training step costs three times as much.

    A multiply-add counts two. Counted: every matrix product and attention over the keys that are in reach, the mean over positions;
    not counted: norms, embedding, softmax, what a pooling pair or a policy adds (they count that themselves), and what an
    implementation wastes on padding. ``rate`` is tokens per byte, t = 0 included; ``length`` T of a crop; with ``samples`` K boundary
    samples of a sequence, encoder and early head are shared by K.
    """
    d = size.width
    beginning = sum(range(1, min(length, size.window) + 1))  # the first positions have fewer keys in reach
    keys = (beginning + max(length - size.window, 0) * size.window) / length
    byte_layer = 2 * (4 + 3 * MLP_RATIO_BYTE) * d * d + 4 * d * keys
    token_layer = 2 * (4 + 3 * MLP_RATIO_TOKEN) * d * d + 4 * d * (rate * length + 1) / 2
    head = 2 * 256 * d
    shared = size.encoder * byte_layer + head
    return shared / samples + size.decoder * byte_layer + head + size.mid * token_layer * rate
