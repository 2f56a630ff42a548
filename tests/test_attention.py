"""Attention: windows, blocks and caches against one dense masked formula; rotary positions; the norm."""

import pytest
import torch
from torch import bfloat16, float32, float64
from torch.nn import functional as F

from models.attention import attend_ring, attend_rows, causal, rotary_angles, rotate, sliding
from models.block import EPSILON, RMSNorm

LENGTHS = [1, 2, 3, 7, 31, 32, 33, 64, 65, 100]
WINDOWS = [1, 2, 3, 16, 32, 33, 40, 64, 128]


def heads(*shape, dtype=float64):
    """Random q, k, v."""
    return [torch.randn(shape, dtype=float64).to(dtype).requires_grad_() for _ in "qkv"]


def dense(q, k, v, window=None):
    """The definition: every pair is scored, and those out of reach are struck out."""
    time = torch.arange(q.shape[-2], device=q.device)
    distance = time[:, None] - time
    reach = (distance >= 0) & (distance < (window or len(time)))
    scores = torch.einsum("...qe,...ke->...qk", q, k) / q.shape[-1] ** 0.5
    weights = torch.where(reach, scores.exp(), 0.0)
    return torch.einsum("...qk,...ke->...qe", weights / weights.sum(-1, keepdim=True), v)


def assert_same(out, reference, inputs, tolerance=1e-12):
    torch.testing.assert_close(out, reference, rtol=0, atol=tolerance)
    direction = torch.randn_like(out)
    for one, other in zip(*(torch.autograd.grad(y, inputs, direction) for y in (out, reference)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("window", WINDOWS)
def test_sliding_is_dense_under_a_band(window):
    for length in LENGTHS:
        qkv = heads(2, 3, length, 4)
        assert_same(sliding(*qkv, window), dense(*qkv, window), qkv)


def test_sliding_on_every_device(device):
    qkv = [x.detach().to(device).requires_grad_() for x in heads(2, 3, 50, 4)]
    assert_same(sliding(*qkv, 16), dense(*qkv, 16), qkv)
    assert_same(causal(*qkv), dense(*qkv), qkv)


@pytest.mark.parametrize(("length", "window"), [(5, 3), (3, 8), (35, 2)])
def test_sliding_has_the_gradient_of_its_differences(length, window):
    assert torch.autograd.gradcheck(lambda *qkv: sliding(*qkv, window), heads(1, 1, length, 2))


@pytest.mark.parametrize("length", [1, 2, 100, 256, 257, 300])  # short ones take explicit products, long ones the fused kernel
def test_causal_is_dense(length):
    qkv = heads(2, 2, length, 4)
    assert_same(causal(*qkv), dense(*qkv), qkv)


@pytest.mark.parametrize("attend", [lambda *qkv: sliding(*qkv, 16), causal])
def test_bfloat16_is_close(attend):
    qkv = heads(2, 3, 70, 8, dtype=bfloat16)
    out = attend(*qkv)
    assert out.dtype == bfloat16
    torch.testing.assert_close(out.double(), attend(*(x.double() for x in qkv)), rtol=0, atol=0.03)


def test_nothing_is_read_out_of_reach():
    q, k, v = heads(1, 1, 40, 4)
    t, window = 35, 16
    grads = torch.autograd.grad(sliding(q, k, v, window)[..., t, :].sum(), (k, v))
    for grad in grads:
        touched = grad.abs().sum((0, 1, 3)).nonzero().squeeze(-1)
        assert touched.tolist() == list(range(t - window + 1, t + 1))


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 8, dtype=float64)

    def score(t, s):
        turned = (rotate(x, rotary_angles(torch.tensor([position]), 8, float64)) for x, position in ((q, t), (k, s)))
        return (next(turned) * next(turned)).sum()

    for t, s in [(5, 2), (3, 3), (0, 7)]:
        torch.testing.assert_close(score(t + 1000, s + 1000), score(t, s), rtol=0, atol=1e-12)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-3


@pytest.mark.parametrize(("dtype", "tolerance"), [(float64, 1e-13), (float32, 1e-5), (bfloat16, 0.1)])
def test_rotary_keeps_norm_and_dtype(dtype, tolerance):
    x = torch.randn(2, 50, 3, 8).to(dtype)
    turned = rotate(x, rotary_angles(torch.arange(50), 8, dtype))
    assert turned.dtype == dtype
    assert torch.equal(turned[:, 0], x[:, 0])
    torch.testing.assert_close(turned.double().norm(dim=-1), x.double().norm(dim=-1), rtol=0, atol=tolerance)


def test_rotary_turns_as_complex_numbers_do():
    x = torch.randn(1, 9, 2, 6, dtype=float64)
    angle = torch.arange(9, dtype=float64)[:, None, None] * 10_000.0 ** -(torch.arange(3, dtype=float64) / 3)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(rotate(x, rotary_angles(torch.arange(9), 6, float64)), torch.cat([turned.real, turned.imag], -1))


@pytest.mark.parametrize("window", [1, 3, 16])
def test_ring_steps_are_sliding(window):
    q, k, v = (x.detach() for x in heads(3, 2, 40, 4))
    late = torch.tensor([0, 5, 0])  # a row that starts later than the others has a clock of its own
    cache = tuple(torch.full((3, 2, window, 4), 99.0, dtype=float64) for _ in "kv")  # of a row before: never to be read
    for t in range(40):
        row = t >= late
        now = (t - late).clamp(min=0)
        step = attend_ring(*(torch.stack([x[b, :, now[b]] for b in range(3)]).unsqueeze(2) for x in (q, k, v)), cache, now)
        parallel = torch.stack([dense(q[b], k[b], v[b], window)[:, now[b]] for b in range(3)])
        torch.testing.assert_close(step.squeeze(2)[row], parallel[row], rtol=0, atol=1e-12)


def test_row_steps_are_causal():
    q, k, v = (x.detach() for x in heads(3, 2, 12, 4))
    expected = causal(q, k, v)
    cache = tuple(torch.full((3, 2, 12, 4), 99.0, dtype=float64) for _ in "kv")
    count = torch.zeros(3, dtype=torch.int64)
    for active in [[0, 1, 2], [1], [0, 2], [1, 2], [2], [2, 0, 1], [1]]:
        rows = torch.tensor(active)
        one = (x[rows, :, count[rows]].unsqueeze(2) for x in (q, k, v))
        step = attend_rows(*one, cache, rows, count[rows], int(count[rows].max()) + 1)
        torch.testing.assert_close(step.squeeze(2), expected[rows, :, count[rows]], rtol=0, atol=1e-12)
        count[rows] += 1


@pytest.mark.parametrize("dtype", [float64, float32])
def test_norm_is_torchs(dtype):
    norm, x = RMSNorm(6).to(dtype), torch.randn(4, 5, 6, dtype=dtype) * torch.logspace(-4, 2, 5, dtype=dtype)[:, None]
    with torch.no_grad():
        norm.weight.normal_()
    inputs = (x.requires_grad_(), norm.weight)
    reference = F.rms_norm(x, (6,), norm.weight, EPSILON)
    direction = torch.randn_like(x)
    torch.testing.assert_close(norm(x), reference)
    for one, other in zip(*(torch.autograd.grad(y, inputs, direction) for y in (norm(x), reference)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4 if dtype == float32 else 1e-9, atol=1e-5 if dtype == float32 else 1e-12)


def test_norm_has_the_gradient_of_its_differences():
    norm = RMSNorm(4).double()
    x = torch.randn(2, 3, 4, dtype=float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (x, norm.weight))


def test_norm_of_bfloat16_is_wide_inside():
    norm, x = RMSNorm(64), (torch.randn(3, 64) * 1e-2).to(bfloat16).requires_grad_()
    torch.testing.assert_close(norm(x).double(), F.rms_norm(x.double(), (64,)), rtol=1e-2, atol=1e-2)
    norm = norm.to(bfloat16)
    out = norm(x)
    assert out.dtype == bfloat16
    out.sum().backward()
    assert x.grad.dtype == norm.weight.grad.dtype == bfloat16


def test_norm_of_zero_is_zero():
    x = torch.zeros(2, 8, requires_grad=True)
    out = RMSNorm(8)(x)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 8)) and x.grad.isfinite().all()
