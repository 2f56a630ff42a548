"""The boundary convention: the drawing of boundaries.py, and that every conversion has an inverse."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segment_env import boundaries as bd

DRAWING = torch.tensor([1, 0, 0, 0, 0, 1, 0, 1]).bool()


@st.composite
def start_rows(draw):
    """One row of starts, the first True."""
    rest = draw(st.lists(st.booleans(), max_size=30))
    return torch.tensor([True, *rest])


def test_the_drawing():
    assert bd.segment_ids(DRAWING).tolist() == [0, 0, 0, 0, 0, 1, 1, 2]
    assert bd.lengths(DRAWING).tolist() == [5, 2, 1]
    assert bd.split(b"Call me.", DRAWING) == [b"Call ", b"me", b"."]
    assert bd.since_start(DRAWING).tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(start_rows())
def test_conversions_have_inverses(starts):
    assert torch.equal(bd.starts_of_ids(bd.segment_ids(starts)), starts)
    lengths = bd.lengths(starts)
    assert torch.equal(bd.starts_of_lengths(lengths), starts)
    assert lengths.min() >= 1 and lengths.sum() == len(starts)
    ids = bd.segment_ids(starts)
    assert torch.equal(torch.repeat_interleave(torch.arange(len(lengths)), lengths), ids)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(start_rows(), st.randoms(use_true_random=False))
def test_segments_joined_are_the_data(starts, random):
    data = random.randbytes(len(starts))
    segments = bd.split(data, starts)
    assert b"".join(segments) == data
    assert [len(segment) for segment in segments] == bd.lengths(starts).tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(start_rows(), st.integers(1, 5))
def test_what_a_decision_knows_of_the_past(starts, n_past):
    since, recent = bd.since_start(starts), bd.recent_starts(starts, n_past)
    for t in range(len(starts) + 1):
        past = starts[:t].tolist()
        assert since[t] == (past[::-1].index(True) + 1 if past else 0)
        assert recent[t].tolist() == ([int(a) for a in past[::-1]] + [0] * n_past)[:n_past]


def test_batches_are_rows_apart():
    starts = torch.rand(5, 12, generator=torch.Generator().manual_seed(0)) < 0.3
    starts[:, 0] = True
    for function in (bd.segment_ids, bd.since_start, lambda s: bd.recent_starts(s, 3)):
        assert torch.equal(function(starts), torch.stack([function(row) for row in starts]))


def test_only_choices_are_the_policys():
    valid = torch.tensor([[True, True, True, False], [True, False, False, False]])
    choice = bd.is_choice(valid)
    assert choice.tolist() == [[False, True, True, False], [False] * 4]
    for action in (torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)):
        starts = bd.effective(action, choice, valid)
        assert starts[:, 0].all() and not starts[~valid].any()
        assert torch.equal(starts[choice], action.bool()[choice])


def test_no_bytes_have_no_segments():
    empty = torch.zeros(0, dtype=torch.bool)
    assert bd.lengths(empty).tolist() == []
    assert torch.equal(bd.starts_of_lengths(bd.lengths(empty)), empty)
    assert bd.split(b"", empty) == []
