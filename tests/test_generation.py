"""Generation: with caches what the parallel pass computes without them, drawn as stated, shown whole."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import float64

from agents.bpe import BpeGuided
from agents.entropy import Entropy
from agents.escaping import printable
from agents.generation import Display, Drawing, Text, generate, shown, stream
from agents.gumbel import GumbelPolicy
from agents.policies import WindowPolicy
from agents.routing import CosineRouting
from agents.rules import IidRandom, UniformStride
from models.mean_pooling import MeanAdd
from models.smoothing import SelectSmooth
from segment_env.batch import Samples, pack
from segment_env.closed_form import TableScorer
from segment_env.errors import UserError
from segment_env.noise import BYTES, uniform
from segment_env.unroll import unroll
from tests.worlds import tiny_unet

PROMPTS = [b"Call me ", b"\xff\x00\xe2", b"", "— Ahab, — ".encode() * 3]


class Gated(WindowPolicy):
    """Gives its probability as a gate: for pairs that need one, whatever n_past."""

    gives_gate = True

    def parallel(self, *args, **kwargs):
        decision = super().parallel(*args, **kwargs)
        return decision._replace(gate=decision.logits.sigmoid())

    def step(self, *args, **kwargs):
        state, decision = super().step(*args, **kwargs)
        return state, decision._replace(gate=decision.logits.sigmoid())


def window(n_past, kind=WindowPolicy):
    policy = kind(32, 0.3, n_past, 1.0).to(float64)
    with torch.no_grad():
        policy.weight.normal_(std=0.5)
    return policy


def randomised(policy):
    with torch.no_grad():
        for parameter in policy.to(float64).parameters():
            parameter.normal_(std=0.3)
    return policy


PAIRS = {
    **{f"select, n_past {n}": (None, lambda n=n: window(n)) for n in (0, 7)},
    **{f"mean, n_past {n}": (MeanAdd, lambda n=n: window(n)) for n in (0, 7)},
    **{f"smoothing, n_past {n}": (SelectSmooth, lambda n=n: window(n, Gated)) for n in (0, 7)},
    "smoothing, routing": (SelectSmooth, lambda: randomised(CosineRouting(32))),
    "mean, gumbel": (MeanAdd, lambda: randomised(GumbelPolicy(32))),
}


@torch.no_grad()
def recomputed(scorer, policy, texts: list[Text], seed: int, replay: bool):
    """log p and starts [B, T] of the parallel pass over whole texts, the starts replayed or drawn by the same noise."""
    batch = pack([text.data for text in texts], seed)
    starts = torch.nn.utils.rnn.pad_sequence([text.starts for text in texts], batch_first=True) if replay else None
    rollout, live = unroll(scorer, policy, batch, Samples([1] * len(texts)), actions=starts)
    return -live.nll, rollout["action"].bool()


@pytest.mark.parametrize("pair", PAIRS)
def test_cached_is_recomputed(pair):
    pooling, make = PAIRS[pair]
    scorer, policy = tiny_unet(pooling=pooling), make()
    num_bytes = 512 if "n_past" in pair else 128
    texts = generate(scorer, policy, PROMPTS, num_bytes, seed=5, boundary_seed=6)
    for replay in (True, False):
        log_p, starts = recomputed(scorer, policy, texts, 6, replay)
        for b, (text, prompt) in enumerate(zip(texts, PROMPTS, strict=True)):
            size = len(prompt) + num_bytes
            assert len(text.data) == size == len(text.starts) and text.data.startswith(prompt) and text.prompt_length == len(prompt)
            assert (text.log_p - log_p[b, :size]).abs().max() < 1e-12
            assert torch.equal(text.starts, starts[b, :size])
    rate = torch.cat([text.starts for text in texts]).double().mean()
    assert 0.02 < rate < 0.98 and len({text.data[-64:] for text in texts}) == 4


def test_the_entropy_rule_reads_the_early_head():
    scorer, policy = tiny_unet(), Entropy(monotonic=True)
    policy.theta.fill_(0.0)
    texts = generate(scorer, policy, PROMPTS, 40)
    log_p, starts = recomputed(scorer, policy, texts, 0, replay=False)
    for b, text in enumerate(texts):
        assert torch.equal(text.starts, starts[b, : len(text.data)]) and 1 < text.starts.sum() < len(text.data)
        assert (text.log_p - log_p[b, : len(text.data)]).abs().max() < 1e-12


@pytest.mark.parametrize("pair", ["select, n_past 7", "mean, gumbel", "smoothing, routing"])
def test_a_row_alone_is_the_row_in_a_batch(pair):
    scorer, policy = tiny_unet(pooling=PAIRS[pair][0]), PAIRS[pair][1]()
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    together = generate(scorer, policy, PROMPTS, 60, **drawn)
    for row, prompt in enumerate(PROMPTS):
        (alone,) = generate(scorer, policy, [prompt], 60, rows=[row], **drawn)
        assert alone.data == together[row].data and torch.equal(alone.starts, together[row].starts)
    (other,) = generate(scorer, policy, PROMPTS[:1], 60, rows=[9], **drawn)
    assert other.data != together[0].data


def test_boundaries_have_a_seed_of_their_own():
    scorer, policy = TableScorer(byte_noise=2.0), IidRandom(0.3)  # boundaries do not hang on the bytes
    one, same, other = (generate(scorer, policy, [b"x"], 60, seed=1, boundary_seed=seed)[0] for seed in (1, None, 2))
    assert torch.equal(one.starts, same.starts) and one.data == same.data
    assert not torch.equal(one.starts, other.starts)
    (byte,) = generate(scorer, policy, [b"x"], 60, seed=2, boundary_seed=1)
    assert torch.equal(one.starts, byte.starts) and one.data != byte.data


def test_bytes_and_boundaries_are_drawn_by_unrelated_numbers():
    """Correlation of two independent sequences of 40,000: beyond 5 standard errors with a chance of 6 * 10^-7; the seed is fixed."""
    u, v = Drawing(seed=4).noise(torch.arange(200), 200)
    correlation = ((u.double() - 0.5) * (v.double() - 0.5)).mean() * 12
    assert abs(correlation) < 5 / math.sqrt(u.numel()) and not (u == v).any()


def test_on_every_device(device):
    scorer, policy = tiny_unet().to(device), window(7).to(device)
    texts = generate(scorer, policy, PROMPTS, 20)
    for text, same in zip(texts, generate(scorer.cpu(), policy.cpu(), PROMPTS, 20), strict=True):
        assert text.data == same.data and torch.equal(text.starts, same.starts)  # in float64
        assert (text.log_p - same.log_p).abs().max() < 1e-9


# --------------------------------------------------------------------------------------------------------------------- drawing


def slowly_drawn(log_p: list[float], u: float, temperature: float, top_p: float) -> int:
    """The same byte for one row, by sorting and adding up."""
    weights = [math.exp((value - max(log_p)) / temperature) for value in log_p]
    p = {byte: weight / sum(weights) for byte, weight in enumerate(weights)}
    kept, mass = [], 0.0
    for byte in sorted(p, key=lambda byte: -p[byte]):
        if mass >= top_p and top_p < 1:
            break
        kept.append(byte)
        mass += p[byte]
    at = 0.0
    for byte in sorted(kept):
        at += p[byte] / mass
        if u < at:
            return byte
    return max(kept)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.95, 1.0])
def test_temperature_and_top_p(temperature, top_p):
    log_p = (torch.randn(300, 256, dtype=float64) * 2).log_softmax(-1)
    log_p[:, ::7] = -torch.inf
    u = uniform(1, BYTES, torch.arange(300))
    drawn = Drawing(temperature, top_p).byte(log_p, u)
    assert drawn.tolist() == [slowly_drawn(*row, temperature, top_p) for row in zip(log_p.tolist(), u.tolist(), strict=True)]
    if top_p == 1e-9:
        assert torch.equal(drawn, log_p.argmax(-1))


def test_the_ends_of_the_noise_and_tiny_temperatures():
    log_p = torch.full((2, 256), -torch.inf)
    log_p[:, 100:103] = math.log(1 / 3)
    u = torch.tensor([2.0**-24, 1 - 2.0**-24])
    assert Drawing().byte(log_p, u).tolist() == [100, 102]
    sharp = torch.linspace(-9, -3, 256).log_softmax(0)[None]
    assert Drawing(1e-300).byte(sharp, u[:1]).tolist() == [255]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_bytes_are_drawn_from_the_softmax(temperature, top_p):
    """Chi-square of 10,000 rows' next bytes against the model's softmax, cells of fewer than 20 together.

    With k degrees of freedom it lies beyond k + 5 sqrt(2k) with a chance below 10^-4 for a sound sampler (k is above 20); the seed is
    fixed. Against a temperature that is 15 % higher the same figure lies beyond.
    """
    scorer, policy, count = tiny_unet(), UniformStride(2), 10_000
    with torch.no_grad():
        state, _ = scorer.init_state(1, 3)
        for byte in b"Oh":
            state, _ = scorer.observe(scorer.predict(state, torch.tensor([byte == ord("O")]))[0], torch.tensor([byte]))
        log_p = scorer.predict(state, torch.tensor([True]))[1][0]
    texts = generate(scorer, policy, [b"Oh"] * count, 1, temperature=temperature, top_p=top_p, seed=11)
    drawn = torch.bincount(torch.tensor([text.data[2] for text in texts]), minlength=256).double()

    def excess(temperature: float) -> float:
        p = (log_p / temperature).softmax(-1)
        if top_p < 1:
            falling, order = p.sort(descending=True)
            p[order[int((falling.cumsum(0) < top_p).sum()) + 1 :]] = 0
        expected = count * p / p.sum()
        assert not drawn[expected == 0].any() or temperature > 1
        rare = (expected < 20) & (expected > 0)
        cells = torch.stack([torch.cat([x[expected >= 20], x[rare].sum()[None]]) for x in (drawn, expected)])
        cells = cells[:, cells[1] > 0]
        k = cells.shape[1] - 1
        assert k > 20
        return float(((cells[0] - cells[1]) ** 2 / cells[1]).sum() - k) / math.sqrt(2 * k)

    assert excess(temperature) < 5
    if top_p == 1:
        assert excess(1.15 * temperature) > 5


@torch.no_grad()
def test_temperature_zero_takes_the_likeliest_byte():
    scorer, policy = tiny_unet(), UniformStride(3)
    texts = generate(scorer, policy, PROMPTS, 12, temperature=0)
    assert [text.data for text in texts] == [text.data for text in generate(scorer, policy, PROMPTS, 12, temperature=0, top_p=0.1, seed=9)]
    text = texts[0]
    for t in range(text.prompt_length, len(text.data)):
        every = torch.tensor([[*text.data[:t], byte] for byte in range(256)])
        starts = text.starts[: t + 1].expand(256, -1)
        nll = scorer.nll(scorer.encode(every)[:, :-1], starts, every)[:, -1]
        assert nll.argmin() == text.data[t]


def test_thresholded_boundaries_draw_nothing():
    scorer, policy = tiny_unet(), window(0)
    one, other = (generate(scorer, policy, PROMPTS, 50, temperature=0, boundary_seed=seed, thresholded=True) for seed in (0, 1))
    assert [text.data for text in one] == [text.data for text in other]
    (text, *_) = one
    with torch.no_grad():
        x = torch.tensor([list(text.data)])
        logits = policy.parallel(scorer.encode(x)[:, :-1], x, torch.full(x.shape, 0.5), None).logits[0]
    assert torch.equal(text.starts[1:], logits[1:] > 0) and 0 < text.starts[1:].double().mean() < 1


def test_a_row_ends_where_it_is_told_to():
    scorer, policy, asked = tiny_unet(), window(7), []
    whole = generate(scorer, policy, PROMPTS, 60, seed=2)

    def stop(row: int, data: bytearray) -> bool:
        asked.append((row, bytes(data)))
        return len(data) == 5 + row

    ended = generate(scorer, policy, PROMPTS, 60, seed=2, stop=stop)
    for row, (text, full) in enumerate(zip(ended, whole, strict=True)):
        assert text.data == full.data[: len(PROMPTS[row]) + 5 + row]
        assert torch.equal(text.log_p, full.log_p[: len(text.data)])
        assert [data for asker, data in asked if asker == row] == [full.data[len(PROMPTS[row]) :][:n] for n in range(1, 6 + row)]
    assert [text.data for text in generate(scorer, policy, PROMPTS, 60, seed=2, stop=lambda *_: False)] == [text.data for text in whole]


# --------------------------------------------------------------------------------------------------------------------- display


def escaped(data: bytes) -> str:
    return "".join(each if each in "\n\t" else printable(each) for each in data.decode("utf-8", "backslashreplace"))


PIECES = st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=4).map(lambda text: text.encode("utf-8", "surrogatepass"))), max_size=8)


@given(PIECES, st.data())
def test_any_bytes_in_any_chunks_are_shown_whole(pieces, data):
    text = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    display, seen = Display(), ""
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        seen += display.add(text[begin:end])
        assert seen in [escaped(text[: end - held]) for held in range(min(end, 3) + 1)]  # a begun character is held back, no more
    assert seen + display.add(b"", end=True) == escaped(text)
    assert all(each.isprintable() or each in "\n\t" for each in seen)


@given(PIECES, st.data())
def test_marks_stand_where_segments_start(pieces, data):
    text = b"".join(pieces)
    starts = [t == 0 or data.draw(st.booleans()) for t in range(len(text))]
    begins = [t for t, start in enumerate(starts) if start]
    segments = [text[a:b] for a, b in pairwise([*begins, len(text)])]
    display = Display()
    found = "".join(shown(text[t : t + 1], starts[t : t + 1], True, display) for t in range(len(text))) + display.add(b"", end=True)
    assert found == "".join("|" + escaped(segment) for segment in segments)
    assert shown(text, starts, False, display) + display.add(b"", end=True) == escaped(text)


def test_terminals_are_told_nothing():
    assert Display().add(b"\x1b[2J\r\x07 ok\n\ttab \x80", end=True) == "\\x1b[2J\\r\\x07 ok\n\ttab \\x80"


# -------------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": -0.1}, "temperature must be a number from 0"),
        ({"temperature": math.nan}, "temperature must be a number from 0"),
        ({"temperature": math.inf}, "temperature must be a number from 0"),
        ({"top_p": 0.0}, "top-p must lie above 0 and be at most 1"),
        ({"top_p": 1.1}, "top-p must lie above 0"),
        ({"top_p": math.nan}, "top-p must lie above 0"),
        ({"num_bytes": 0}, "bytes to generate must be at least 1, got 0"),
        ({"prompts": []}, "no prompt to go on from"),
    ],
)
def test_numbers_that_are_none(settings, says):
    with pytest.raises(UserError, match=says):
        generate(**{"scorer": tiny_unet(), "policy": window(0), "prompts": PROMPTS, "num_bytes": 4, **settings})


def test_policies_that_cannot_generate():
    with pytest.raises(UserError, match="BpeGuided is not causal"):
        stream(tiny_unet(), BpeGuided(300), PROMPTS, 4)
    with pytest.raises(UserError, match="does not read: use another pooling"):
        stream(tiny_unet(), CosineRouting(32), PROMPTS, 4)
    with pytest.raises(UserError, match="gives none: use another pooling"):
        stream(tiny_unet(pooling=SelectSmooth), window(0), PROMPTS, 4)
