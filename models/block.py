"""The layer of the byte U-Net: a Gemma-2-style block (arXiv 2408.00118) without soft-caps.

Letters: B rows, T positions, D width, H heads, E = D / H, F hidden width.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from models.attention import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  #: q, k, v [B, H, T, E] -> [B, H, T, E]


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (arXiv 1910.07467) that also takes half-precision input, which autocast leaves as it is."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D], of x's dtype; the mean is taken in float32 or wider."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(GeGLU(norm(x))).

    How a layer attends is the caller's: the same code serves windows, full attention and their cached steps.

    Args: ``width`` D; ``heads`` H; ``mlp_ratio`` F / D.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.after_attention = RMSNorm(width), RMSNorm(width)
        self.before_mlp, self.after_mlp = RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_and_up = nn.Linear(width, 2 * mlp_ratio * width, bias=False)
        self.down = nn.Linear(mlp_ratio * width, width, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x [B, T, D] at rotary ``angles`` -> [B, T, D]."""
        x = x + self.after_attention(self.attention(self.before_attention(x), angles, attend))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))

    def attention(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x [B, T, D] -> [B, T, D]: queries and keys are turned, then ``attend`` does the rest."""
        q_and_k, v = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).split([2 * self.heads, self.heads], -2)
        q, k = rotate(q_and_k, angles).chunk(2, -2)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        return self.out(attend(q, k, v).transpose(1, 2).flatten(-2))

    def mlp(self, x: Tensor) -> Tensor:
        """GeGLU (arXiv 2002.05202) with the tanh approximation, as in Gemma."""
        gate, up = self.gate_and_up(x).chunk(2, -1)
        return self.down(F.gelu(gate, approximate="tanh") * up)
