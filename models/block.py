"""The layer of the byte U-Net: a Gemma-2-style block (arXiv 2408.00118) without soft-caps.

Letters: B rows, T positions, D width, H heads, E = D / H, F hidden width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.attention import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  #: q, k, v [B, H, T, E] -> [B, H, T, E]


EPSILON = torch.finfo(torch.float32).eps  #: of the norms, in every dtype: float64 computes the same function


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (arXiv 1910.07467) that also takes half-precision input, which autocast leaves as it is.

    On CUDA the fused kernel; on CPU the same formula with its backward in closed form, which is twice as fast as torch's.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D], of x's dtype or wider; the mean is taken in float32 or wider."""
        if x.is_cuda:
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), EPSILON)
        return _RMSNorm.apply(x, self.weight) if torch.is_grad_enabled() else _normed(x, self.weight)[0]


def _normed(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] normed, and 1 / rms(x) [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    scale = (norm.square() / x.shape[-1] + EPSILON).rsqrt()
    return (x * scale).mul_(weight).to(weight.dtype), scale


class _RMSNorm(torch.autograd.Function):
    """y = w n with n = x / rms(x); dL/dx = (w g - n mean(w g n)) / rms(x) and dL/dw = sum g n, for g = dL/dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        normed, scale = _normed(x, weight)
        ctx.save_for_backward(x, scale, weight)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, weight = ctx.saved_tensors
        n = x * scale
        product = grad * n
        mean = (product * weight).mean(-1, keepdim=True)
        grad_x = n.mul_(-mean).addcmul_(grad, weight).mul_(scale)
        return grad_x.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype)


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
