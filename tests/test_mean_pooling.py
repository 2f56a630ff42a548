"""Nawrot's pooling pair: which h a token averages, which bytes read it, and the gate's gradient against the whole assignment matrix.

Letters: B rows, T bytes, M segments of the row that has most, D width.
"""

import pytest
import torch
from torch import Tensor, bfloat16, float32, float64
from worlds import pooled_both_ways

from models.mean_pooling import MeanAdd
from models.pooling import SelectAdd


class Bare(MeanAdd):
    """Without the norm, so that means can be read off."""

    def __init__(self, width: int = 3):
        super().__init__(width)
        self.norm = torch.nn.Identity()


def rows_of(length: int, rows: int = 4, rate: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """h [B, T, D], starts, and a gate as unroll hands it on: 1 at t = 0."""
    starts = torch.rand(rows, length) < rate
    starts[:, 0], starts[1, 1:], starts[2] = True, False, True
    gate = torch.rand(rows, length, dtype=float64)
    gate[:, 0] = 1
    return torch.randn(rows, length, 3, dtype=float64), starts, gate


def explicit(pair: Bare, h: Tensor, starts: Tensor, gate: Tensor) -> Tensor:
    """Tokens by assignment weights w[t, k] = 1 - (k - n[t]) where k = n[t], else 0, n the cumulative sum of straight-through starts."""
    hard = starts.double()
    number = (hard + gate - gate.detach()).cumsum(-1)[:, :-1, None] - 1  # of the segment that h[t + 1] is pooled in
    k = torch.arange(int(starts.sum(-1).max()), dtype=float64)
    weights = torch.where(number.detach() == k, 1 - (k - number), 0.0)  # [B, T - 1, M]
    means = torch.einsum("btd,btk->bkd", h[:, 1:], weights) / weights.sum(1)[..., None].clamp(min=1e-9)
    return torch.cat([pair.null.expand(len(h), 1, -1), means], 1)[:, : len(k)]


def test_the_drawing() -> None:
    """|Call_|me|.|: h[t] is the number t, the null token is -1."""
    pair = Bare(1).double()
    torch.nn.init.constant_(pair.null, -1.0)
    h = torch.arange(8, dtype=float64)[None, :, None]
    starts = torch.tensor([[1, 0, 0, 0, 0, 1, 0, 1]]).bool()
    tokens, positions = pair.down(h, starts)
    assert positions.tolist() == [[0, 5, 7]]
    assert tokens.flatten().tolist() == [-1, (1 + 2 + 3 + 4 + 5) / 5, (6 + 7) / 2]  # h[s+1 .. e+1] of |Call_| and |me|; |.| is unfinished
    read = pair.up(h, tokens, starts) - h
    assert read.flatten().tolist() == [-1] * 5 + [3, 3] + [6.5]  # each byte reads the segment before its own


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_tokens_are_the_loop(length: int, rate: float) -> None:
    pair, (h, starts, _) = Bare().double(), rows_of(length, rate=rate)
    tokens, positions = pair.down(h, starts)
    for b in range(len(h)):
        times = starts[b].nonzero().squeeze(1).tolist()
        assert positions[b, : len(times)].tolist() == times
        assert torch.equal(tokens[b, 0], pair.null)
        for k in range(1, len(times)):
            expected = h[b, times[k - 1] + 1 : times[k] + 1].mean(0)
            torch.testing.assert_close(tokens[b, k], expected, rtol=0, atol=1e-14)
    assert tokens.isfinite().all()
    assert torch.equal(pair.up(h, tokens, starts), SelectAdd().up(h, tokens, starts))


@pytest.mark.parametrize("length", [2, 3, 30])
def test_the_gates_gradient_is_that_of_the_whole_matrix(length: int) -> None:
    pair, (h, starts, gate) = Bare().double(), rows_of(length)
    h.requires_grad_()
    gate.requires_grad_()
    got, expected = pair.down(h, starts, gate)[0], explicit(pair, h, starts, gate)
    real = torch.arange(got.shape[1]) < starts.sum(-1, keepdim=True)  # beyond its own segments a row has none
    torch.testing.assert_close(got[real], expected[real], rtol=0, atol=1e-13)
    upstream = torch.randn_like(got) * real[..., None]
    gradients = [torch.autograd.grad(tokens, (h, gate, pair.null), upstream) for tokens in (got, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    of_gate = gradients[0][1]
    assert of_gate.any() == (length == 30) and of_gate[2].abs().max() < 1e-12  # a mean of one vector does not move with its weight


def test_without_a_gate_the_tokens_are_the_same() -> None:
    pair, (h, starts, gate) = MeanAdd(3).double(), rows_of(25)
    assert torch.equal(pair.down(h, starts)[0], pair.down(h, starts, gate)[0])


def test_a_norm_follows_the_mean() -> None:
    pair, (h, starts, _) = MeanAdd(3).double(), rows_of(25)
    tokens = pair.down(h, starts)[0][0, : int(starts[0].sum())]
    torch.testing.assert_close(tokens.square().mean(-1), torch.ones(len(tokens), dtype=float64), rtol=1e-5, atol=0)


def test_steps_are_parallel() -> None:
    parallel, stepped = pooled_both_ways(MeanAdd(3).double(), *rows_of(40))
    torch.testing.assert_close(stepped, parallel, rtol=0, atol=1e-13)


def test_one_size_is_read_from_the_device(monkeypatch) -> None:
    reads = []
    for name in ("__int__", "__index__", "__bool__", "item", "tolist"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, name=name, original=original: reads.append(name) or original(x))
    pair, (h, starts, gate) = MeanAdd(3).double(), rows_of(30)
    reads.clear()
    pair.up(h, pair.down(h, starts, gate)[0], starts, gate)
    assert reads == ["__int__"]


def test_rows_of_padding_alone() -> None:
    pair, (h, starts, gate) = MeanAdd(3).double(), rows_of(12)
    valid = torch.arange(12) < torch.tensor([12, 5, 1, 0])[:, None]
    starts, gate = starts & valid, torch.where(valid, gate, 0).requires_grad_()
    out = pair.up(h, pair.down(h, starts, gate)[0], starts, gate)
    (grad,) = torch.autograd.grad(out[valid].sum(), gate)
    assert out.isfinite().all() and grad.isfinite().all() and not grad[~valid].any()
    assert pair.down(h, torch.zeros_like(starts), gate)[0].shape == (4, 1, 3)


def test_half_precision_sums_long_segments_in_float32() -> None:
    """600 vectors that are 1 up to rounding: a running sum in bf16 stops at 256."""
    pair, h = Bare(), torch.ones(1, 602, 3).bfloat16()
    starts, gate = torch.zeros(1, 602, dtype=torch.bool), torch.rand(1, 602)
    starts[0, [0, 601]] = True
    with torch.autocast("cpu", bfloat16):
        tokens, _ = pair.down(h, starts, gate)
    assert tokens.dtype in (bfloat16, float32) and torch.equal(tokens[0, 1].float(), torch.ones(3))
