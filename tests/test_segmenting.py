"""Segments joined are the data, whatever the bytes and however many; long data is read as one sequence."""

import pickle
import random

import pytest
import torch
from torch import float64, nn
from worlds import Stepped, tiny_unet

from agents import segmenting
from agents.entropy import Entropy
from agents.policies import WindowPolicy
from agents.segmenting import Segment, segment
from agents.text_rules import Whitespace
from models import ByteUNet
from models.sizes import Size
from segment_env.batch import Samples, pack
from segment_env.closed_form import TableScorer
from segment_env.unroll import unroll


def policy_of(width: int, n_past: int = 0, dtype: torch.dtype = float64) -> WindowPolicy:
    torch.manual_seed(0)
    policy = WindowPolicy(width, 0.2, n_past).to(dtype)
    nn.init.normal_(policy.weight, std=5.0)
    return policy


def check(segments: list[Segment], data: bytes) -> None:
    assert b"".join(segments) == data and all(segments)
    assert all(each == data[each.start : each.end] for each in segments)
    assert [each.start for each in segments[1:]] == [each.end for each in segments[:-1]]


@pytest.mark.parametrize("n_past", [0, 3])
def test_joined_segments_are_the_data(n_past: int) -> None:
    rng = random.Random(0)
    scorer, policy = TableScorer(), policy_of(8, n_past, torch.float32)
    counts = []
    for data in [b"", b"\xff", bytes(range(256)), *(rng.randbytes(rng.randrange(1, 300)) for _ in range(200))]:
        segments = segment(scorer, policy, data, seed=rng.randrange(100))
        check(segments, data)
        counts.append(len(segments))
    assert counts[:2] == [0, 1] and sum(counts) > 2000


def test_a_megabyte() -> None:
    """In pieces of the encoder's work; the states that are kept take 64 bytes a byte here."""
    torch.manual_seed(0)
    unet = ByteUNet(Size(width=16, heads=2, encoder=1, mid=1, decoder=1, window=8))
    data = random.Random(1).randbytes(1 << 20)
    segments = segment(unet, policy_of(16, dtype=torch.float32), data)
    check(segments, data)
    assert 0.1 < len(segments) / len(data) < 0.4


@pytest.mark.parametrize("n_past", [0, 3])
def test_segments_are_those_of_the_rollout(n_past: int) -> None:
    unet, data = tiny_unet(), bytes(range(200))
    policy = policy_of(unet.width, n_past)
    rollout, _ = unroll(unet, policy, pack([data], 7), Samples([1]))
    assert [each.start for each in segment(unet, policy, data, seed=7)] == rollout["action"][0].nonzero().squeeze(1).tolist()


def test_pieces_are_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder's states of long data do not depend on where it is cut: 1e-12 in float64, with two layers of encoder."""
    torch.manual_seed(0)
    unet = ByteUNet(Size(width=16, heads=2, encoder=2, mid=1, decoder=1, window=8)).double()
    assert unet.encoder_reach == 15
    x = torch.randint(256, (1, 500))
    expected = unet.encode(x)[:, :-1]
    for piece in (1, 7, 64, 499):
        monkeypatch.setattr(segmenting, "PIECE", piece)
        assert (segmenting._encoded(unet, x) - expected).abs().max() < 1e-12
    changed = x.clone()
    changed[0, 100] += 1
    moved = (unet.encode(changed) - unet.encode(x)).abs().amax(-1)[0] > 0
    assert moved.nonzero().squeeze(1).tolist() == list(range(101, 101 + unet.encoder_reach)), "the reach is not a byte too long"


def unsure() -> Entropy:
    policy = Entropy()
    policy.theta.fill_(5.0)
    return policy


@pytest.mark.parametrize("policy", [Stepped(policy_of(32, 2)), unsure(), Whitespace()], ids=["stepped", "early head", "rule"])
def test_policies_of_every_kind(policy) -> None:
    data = b"Call me Ishmael. Some years ago"
    check(segments := segment(tiny_unet(), policy, data), data)
    if isinstance(policy, Whitespace):
        assert segments == [b"Call ", b"me ", b"Ishmael. ", b"Some ", b"years ", b"ago"]


def test_a_segment_is_bytes() -> None:
    (each,) = segment(TableScorer(), Whitespace(), b"word")
    assert each == b"word" and {each: 1}[b"word"] and each.decode() == "word" and isinstance(each, bytes)
    copied = pickle.loads(pickle.dumps(Segment(b"ab", 5)))
    assert (copied, copied.start, copied.end) == (b"ab", 5, 7)
