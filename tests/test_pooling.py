"""Pooling pairs: against a loop over bytes, a row at a time."""

import pytest
import torch
from torch import float64
from worlds import pooled_both_ways

from models.pooling import SelectAdd


def looped(h, starts, layers):
    """Tokens of every row, and h + the answer of ``layers`` (a function of a token and its index), a byte at a time."""
    tokens, out = [], h.clone()
    for b in range(len(h)):
        tokens.append([])
        for t in range(h.shape[1]):
            if starts[b, t]:
                tokens[b].append((t, h[b, t]))
            if tokens[b]:
                out[b, t] = h[b, t] + layers(tokens[b][-1][1], len(tokens[b]) - 1)
    return tokens, out


def rows_of(rows, length, rate):
    starts = torch.rand(rows, length) < rate
    starts[:, 0] = True
    return torch.randn(rows, length, 3, dtype=float64), starts


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_select_add_is_the_loop(length, rate):
    h, starts = rows_of(4, length, rate)
    starts[1, 1:], starts[2] = False, True  # rows of one segment and of T beside the random ones
    pooling, index = SelectAdd(), torch.arange(length, dtype=float64)
    tokens, positions = pooling.down(h, starts)
    expected, out = looped(h, starts, lambda token, m: 2 * token + m)
    assert tokens.shape == (4, length, 3) and positions.shape == (4, length)  # M of the row that has most
    for b, row in enumerate(expected):
        assert positions[b, : len(row)].tolist() == [t for t, _ in row]
        for m, (_, token) in enumerate(row):
            assert torch.equal(tokens[b, m], token)
        assert torch.equal(tokens[b, len(row) :], h[b, :1].expand(length - len(row), -1))
    assert torch.equal(pooling.up(h, 2 * tokens + index[:, None], starts), out)


def test_m_is_the_most_segments_of_a_row():
    h, starts = rows_of(5, 30, 0.2)
    assert SelectAdd().down(h, starts)[0].shape[1] == starts.sum(-1).max()


def test_one_size_is_read_from_the_device(monkeypatch):
    reads = []
    for name in ("__int__", "__index__", "__bool__", "item", "tolist"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, name=name, original=original: reads.append(name) or original(x))
    h, starts = rows_of(5, 30, 0.2)
    pooling = SelectAdd()
    tokens, _ = pooling.down(h, starts)
    pooling.up(h, tokens, starts)
    assert reads == ["__int__"]


def test_rows_of_padding_alone():
    h, starts = rows_of(3, 6, 0.5)
    starts[1] = False
    pooling = SelectAdd()
    tokens, positions = pooling.down(h, starts)
    out = pooling.up(h, tokens, starts)
    assert out.isfinite().all() and torch.equal(positions[1], torch.zeros_like(positions[1]))
    assert torch.equal(out[0], looped(h[:1], starts[:1], lambda token, m: token)[1][0])
    tokens, _ = pooling.down(h, torch.zeros_like(starts))
    assert tokens.shape == (3, 1, 3)


def test_the_gradient_returns_to_the_starts():
    h, starts = rows_of(3, 7, 0.4)
    pooling = SelectAdd()

    def there_and_back(h):
        return pooling.up(h, pooling.down(h, starts)[0].square(), starts)

    assert torch.autograd.gradcheck(there_and_back, h.requires_grad_())


def test_steps_are_parallel():
    parallel, stepped = pooled_both_ways(SelectAdd(), *rows_of(3, 20, 0.3))
    assert torch.equal(stepped, parallel)
