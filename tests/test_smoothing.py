"""H-Net's pooling pair: smoothing against the recurrence a segment at a time, and where its gradients go.

Letters: B rows, T bytes, M segments of the row that has most, D width.
"""

import pytest
import torch
from torch import Tensor, bfloat16, float32, float64
from worlds import pooled_both_ways

from models.smoothing import LEAST, SelectSmooth, smoothed
from segment_env.boundaries import segment_ids


def looped(y: Tensor, p: Tensor) -> Tensor:
    """The recurrence, a segment at a time."""
    kept, out = torch.zeros_like(y[:, 0]), []
    for k in range(y.shape[1]):
        weight = p[:, k, None].clamp(LEAST, 1 - LEAST)
        kept = weight * y[:, k] + (1 - weight) * kept
        out.append(kept)
    return torch.stack(out, 1)


def probabilities(kind: str, rows: int, count: int) -> Tensor:
    p = torch.rand(rows, count, dtype=float64)
    return {"any": p, "sure": 0.5 + p / 2, "extreme": (p > 0.5).double(), "none": 0 * p, "all": 0 * p + 1}[kind]


def pair_of(width: int = 3, scale: float = 0.7) -> SelectSmooth:
    pair = SelectSmooth(width).double()
    torch.nn.init.normal_(pair.residual, std=scale)
    return pair


def rows_of(length: int, rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """h [B, T, D], starts, and a gate as unroll hands it on: 1 at t = 0."""
    starts = torch.rand(rows, length) < 0.3
    starts[:, 0], starts[1, 1:], starts[2] = True, False, True
    gate = torch.rand(rows, length, dtype=float64)
    gate[:, 0] = 1
    return torch.randn(rows, length, 3, dtype=float64), starts, gate


def test_a_literal() -> None:
    y, p = torch.tensor([[[1.0], [2.0], [4.0]]], dtype=float64), torch.tensor([[1.0, 0.25, 0.5]], dtype=float64)
    first = 1 - LEAST
    second = 0.25 * 2 + 0.75 * first
    expected = [first, second, 0.5 * 4 + 0.5 * second]
    torch.testing.assert_close(smoothed(y, p).flatten(), torch.tensor(expected, dtype=float64), rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", ["any", "sure", "extreme", "none", "all"])
@pytest.mark.parametrize("count", [1, 2, 32, 33, 70, 1100])  # one block, blocks, and blocks of blocks
def test_smoothing_is_the_recurrence(kind: str, count: int) -> None:
    y, p = torch.randn(3, count, 2, dtype=float64, requires_grad=True), probabilities(kind, 3, count).requires_grad_()
    got, expected = smoothed(y, p), looped(y, p)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(got)
    for one, other in zip(torch.autograd.grad(got, (y, p), upstream), torch.autograd.grad(expected, (y, p), upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["any", "extreme"])
def test_float32_loses_no_digits_to_long_rows(kind: str) -> None:
    y, p = torch.randn(2, 700, 2), probabilities(kind, 2, 700).float()
    torch.testing.assert_close(smoothed(y, p).double(), looped(y.double(), p.double()), rtol=0, atol=2e-6)


def test_autocast_does_not_round_it() -> None:
    y, p = torch.randn(2, 50, 2), torch.rand(2, 50)
    with torch.autocast("cpu", bfloat16):
        narrow = smoothed(y, p)
    assert narrow.dtype == float32 and torch.equal(narrow, smoothed(y, p))


@pytest.mark.parametrize("length", [1, 2, 17, 90])
def test_what_a_byte_receives(length: int) -> None:
    pair, (h, starts, gate) = pair_of(), rows_of(length)
    tokens, positions = pair.down(h, starts, gate)
    y = tokens.sin()
    out = pair.up(h, y, starts, gate)
    for b in range(len(h)):
        (times,) = starts[b].nonzero(as_tuple=True)
        assert positions[b, : len(times)].tolist() == times.tolist() and torch.equal(tokens[b, : len(times)], h[b, times])
        zbar = looped(h[b : b + 1, times].sin(), gate[b : b + 1, times])[0]
        torch.testing.assert_close(out[b], zbar[segment_ids(starts[b])] + h[b] @ pair.residual.T, rtol=0, atol=1e-12)


def test_it_begins_without_a_residual_unless_it_is_told() -> None:
    h, starts, gate = rows_of(9)
    y = SelectSmooth(3).down(h, starts)[0].sin()
    without, with_h = (SelectSmooth(3, residual).double().up(h, y, starts, gate) for residual in (0.0, 1.0))
    assert torch.equal(without[1], (y[1, :1] * (1 - LEAST)).expand(9, -1))
    torch.testing.assert_close(with_h, without + h, rtol=0, atol=1e-15)


def test_the_confidence_is_one_forward_and_itself_backward() -> None:
    """Against zbar c[t] written out, whose value differs and whose gradient in c at 1 does not."""
    pair, (h, starts, gate) = pair_of(), rows_of(40)
    gate.requires_grad_()
    y = pair.down(h, starts)[0].sin()
    upstream = torch.randn(4, 40, 3, dtype=float64)
    (got,) = torch.autograd.grad(pair.up(h, y, starts, gate), gate, upstream)
    expected = torch.zeros_like(gate)
    for b in range(4):
        (times,) = starts[b].nonzero(as_tuple=True)
        at_start = gate[b, times].detach().requires_grad_()
        zbar = looped(h[b : b + 1, times].sin(), at_start[None])[0][segment_ids(starts[b])]
        (through_p,) = torch.autograd.grad(zbar, at_start, upstream[b])
        expected[b, times] += through_p
        sign = torch.where(starts[b], 1.0, -1.0)  # c = p where a start, 1 - p elsewhere
        expected[b] += sign * (upstream[b] * zbar.detach()).sum(-1)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert (got != 0).all()


def test_steps_are_parallel() -> None:
    parallel, stepped = pooled_both_ways(pair_of(), *rows_of(40))
    torch.testing.assert_close(stepped, parallel, rtol=0, atol=1e-13)


def test_rows_of_padding_alone() -> None:
    pair, (h, starts, gate) = pair_of(), rows_of(12)
    valid = torch.arange(12) < torch.tensor([12, 5, 1, 0])[:, None]
    starts, gate = starts & valid, torch.where(valid, gate, 0).requires_grad_()
    out = pair.up(h, pair.down(h, starts)[0], starts, gate)
    (grad,) = torch.autograd.grad(out[valid].sum(), gate)
    assert out.isfinite().all() and grad.isfinite().all() and not grad[~valid].any()
    alone = pair.up(h[1:2, :5], pair.down(h[1:2, :5], starts[1:2, :5])[0], starts[1:2, :5], gate[1:2, :5])
    torch.testing.assert_close(out[1, :5], alone[0], rtol=0, atol=1e-13)
