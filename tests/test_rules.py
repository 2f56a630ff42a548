"""Given rules: what they say of known bytes, and that they read the past alone unless they are flagged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import SCORERS, RaggedStream, make_env

from agents.bpe import BpeGuided
from agents.entropy import Entropy
from agents.rules import ExactRandom, IidRandom, Rule, UniformStride
from agents.text_rules import SPACELIKE, AfterClass, Lines, SpaceByte, Whitespace, byte_class
from agents.truth import KnownWords
from segment_env.actor import Actor
from segment_env.batch import Batch, Samples, pack
from segment_env.boundaries import split
from segment_env.closed_form import CountingStream
from segment_env.errors import UserError
from segment_env.scorer import is_causal, note
from segment_env.streams import MadeUpLanguage, TextStream
from segment_env.unroll import unroll

SCORER = SCORERS["unet"]()
LANGUAGE = MadeUpLanguage(lexicon_size=20, seed=1)
TEXT = "Call me  Ishmael. Some years ago—never mind how long\nprecisely: Ça va, Ёжик? 私は猫である。 مرحبا بالعالم! 🐋🐳\n\n".encode()


def entropy_rule(monotonic: bool) -> Entropy:
    """Calibrated on the text, under the byte U-Net."""
    rule = Entropy(0.3, monotonic)
    rule.calibrate(SCORER, [pack([TEXT * 2])])
    return rule


def bpe() -> BpeGuided:
    rule = BpeGuided(300)
    rule.read_training([TEXT * 20])
    return rule


RULES = {
    "stride": UniformStride(3),
    "iid": IidRandom(0.3),
    "exact": ExactRandom(0.3),
    "whitespace": Whitespace(),
    "whitespace_first": Whitespace(first_only=True),
    "spacebyte": SpaceByte(),
    "lines": Lines(),
    "bpe": bpe(),
    "entropy": entropy_rule(False),
    "entropy_rise": entropy_rule(True),
    "truth": KnownWords(LANGUAGE),
}
CAUSAL = [name for name, rule in RULES.items() if rule.causal]
NOT_CAUSAL = [name for name in RULES if name not in CAUSAL]


def starts_of(rule: Rule, *documents: bytes) -> list[list[int]]:
    """Starts of every document, by unroll: indices, 0 among them."""
    rollout, _ = unroll(SCORER, rule, pack(documents), Samples([1] * len(documents)))
    return [row.nonzero().squeeze(-1).tolist() for row in rollout["action"]]


def cut(rule: Rule, text: str | bytes) -> list[bytes]:
    data = text.encode() if isinstance(text, str) else text
    (starts,) = starts_of(rule, data)
    mask = torch.zeros(len(data), dtype=torch.bool)
    mask[starts] = True
    return split(data, mask)


def every(kind: type) -> set[type]:
    return {kind}.union(*(every(below) for below in kind.__subclasses__()))


def test_no_rule_is_forgotten() -> None:
    ours = {rule for rule in every(Rule) if rule.__module__.startswith("agents.")}
    assert {type(rule) for rule in RULES.values()} == ours - {Rule, AfterClass}
    assert NOT_CAUSAL == ["exact", "bpe"]


# --- bytes and texts ---


def test_classes_of_all_256_bytes() -> None:
    for byte in range(256):
        alphanumeric = ord("0") <= byte <= ord("9") or ord("A") <= byte <= ord("Z") or ord("a") <= byte <= ord("z")
        continuation = byte & 0b1100_0000 == 0b1000_0000
        assert SpaceByte().table[byte] == (not alphanumeric and not continuation), byte
        assert Whitespace().table[byte] == bytes([byte]).isspace(), byte
        assert Lines().table[byte] == (byte == 10), byte
    assert len(SPACELIKE) == 256 - 62 - 64
    assert not any(rule.table[256] for rule in (SpaceByte(), Whitespace(), Lines())), "BOS is in no class"
    assert byte_class(b"").sum() == 0


@pytest.mark.parametrize(
    "rule, text, pieces",
    [
        (Whitespace(), "to  be\tor", ["to ", " ", "be\t", "or"]),
        (Whitespace(first_only=True), "to  be\tor", ["to ", " be\t", "or"]),
        (Whitespace(first_only=True), " \n a", [" ", "\n a"]),  # BOS is no whitespace: the first byte is the first of a run
        (Whitespace(), "a\u00a0b c", ["a\u00a0b ", "c"]),  # no-break spaces are not ASCII
        (Lines(), "a\n\nb c\n", ["a\n", "\n", "b c\n"]),
        (SpaceByte(), "Call me, now", ["Call ", "me,", " now"]),
        (SpaceByte(), "x=f(1)", ["x=", "f(", "1)"]),
        (SpaceByte(), "  a", [" ", " a"]),
    ],
)
def test_golden_ascii(rule: Rule, text: str, pieces: list[str]) -> None:
    assert cut(rule, text) == [piece.encode() for piece in pieces]


@pytest.mark.parametrize(
    "text", ["déjà vu où", "Ёжик в тумане", "私は猫である。", "🐋 whale 🐳🐳", "مرحبا بالعالم", "a\u0301e\u0301 combining"]
)
def test_golden_scripts(text: str) -> None:
    """By characters: the byte after the first one of a character outside ASCII starts a segment, but for its run."""
    data = text.encode()
    first = [len(text[:i].encode()) for i in range(len(text))]
    spacelike = {at for at, char in zip(first, text, strict=True) if not (char.isascii() and char.isalnum())}
    expected = {at + 1 for at in spacelike if at - 1 not in spacelike and at + 1 < len(data)}
    assert starts_of(SpaceByte(), data) == [sorted({0} | expected)]
    spaces = {at + 1 for at in range(len(data) - 1) if data[at : at + 1] == b" "}
    assert starts_of(Whitespace(), data) == [sorted({0} | spaces)]


def test_crops_that_begin_inside_a_character() -> None:
    data = "私は".encode()[1:]
    assert data[0] & 0xC0 == 0x80
    assert starts_of(SpaceByte(), data) == [[0, 3]]  # after 0xE3, at index 2; nothing at the continuation bytes before
    for name, rule in RULES.items():
        for begin in range(4):
            (starts,) = starts_of(rule, "🐋 ok".encode()[begin:])
            assert starts[0] == 0, name


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("length", [0, 1])
def test_short_rows(name: str, length: int) -> None:
    x = torch.full((2, length), 32)
    flat = torch.full((2, length, 256), 1 / 256).log()
    decision = RULES[name].parallel(torch.zeros(2, length, 3), x, torch.full((2, length), 0.5), flat)
    assert decision.action.shape == (2, length) and decision.action.dtype == torch.bool
    if length:
        assert starts_of(RULES[name], b" ") == [[0]]


def test_the_truth_is_the_languages_own() -> None:
    x, *_ = LANGUAGE.sequences(3, torch.arange(4), 60)
    rule, garbage = RULES["truth"], torch.randint(0, 256, (3, 40))
    for bytes_ in (x, garbage):
        assert torch.equal(rule.parallel(None, bytes_, None).action, LANGUAGE.reference(bytes_))


# --- exactly k ---


@pytest.mark.parametrize("rate", [0.01, 0.2, 0.5, 0.99])
def test_exactly_k_of_the_choices_of_every_row(rate: float) -> None:
    documents = [b"a" * n for n in (1, 2, 11, 40, 41)]
    for found, document in zip(starts_of(ExactRandom(rate), *documents), documents, strict=True):
        assert len(found) - 1 == round(rate * (len(document) - 1)) and found[0] == 0


def test_every_choice_is_equally_likely() -> None:
    """Each of 10 choices is among the 3 with probability 0.3, to within 4 deviations of 0.0072.

    Were the seed free, it would fail of itself once in 1600 runs; a place whose probability is off by 0.06 would pass once in 30,000.
    """
    rule, rows = ExactRandom(0.3), 4000
    decision = rule.parallel(torch.zeros(rows, 11, 1), torch.zeros(rows, 11, dtype=torch.int64), torch.rand(rows, 11))
    share = decision.action[:, 1:].double().mean(0)
    assert decision.action[:, 1:].sum(1).eq(3).all()
    assert (share - 0.3).abs().max() < 4 * (0.3 * 0.7 / rows) ** 0.5


# --- both faces, and rows apart ---


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("stream", ["ragged", "text", "words"])
def test_stepping_is_deciding_at_once(name: str, stream: str) -> None:
    streams = {"ragged": RaggedStream(13, 1, 6, 12), "text": TextStream(TEXT), "words": LANGUAGE}
    env = make_env(SCORER, (2, 1, 1), 13, streams[stream])
    for _ in range(2):  # the second episode finds the state of the first, and begins anew
        with torch.no_grad():
            stepped = env.rollout(13, Actor(RULES[name], SCORER), break_when_all_done=True, break_when_any_done=False)
        parallel, _ = unroll(SCORER, RULES[name], env.batch, env.samples)
        assert torch.equal(stepped["action"][parallel["valid"]], parallel["action"][parallel["valid"]])


@pytest.mark.parametrize("name", CAUSAL)
def test_a_state_begins_anew_with_its_row(name: str) -> None:
    """One actor for two episodes: what the first ended on is forgotten."""
    env, actor = make_env(SCORER, (1, 1), 9, TextStream(TEXT)), Actor(RULES[name], SCORER)
    for _ in range(3):
        with torch.no_grad():
            stepped = env.rollout(9, actor)
        assert torch.equal(stepped["action"], unroll(SCORER, RULES[name], env.batch, env.samples)[0]["action"])


@pytest.mark.parametrize("name", RULES)
def test_a_batch_is_its_rows(name: str) -> None:
    """Padding decides nothing, not even where it goes on as the text would."""
    begins, lengths = (0, 9, 70, 60), (50, 11, 1, 40)
    documents = [TEXT[begin : begin + n] for begin, n in zip(begins, lengths, strict=True)]
    batch, longer = pack(documents, seed=5), pack([TEXT[begin : begin + 50] for begin in begins])
    noisy = Batch(longer.bytes, batch.valid, batch.terminated, batch.sequence, batch.seed)
    whole, _ = unroll(SCORER, RULES[name], noisy, Samples([2, 1, 1, 1]))
    for i, document in enumerate(documents):
        alone, _ = unroll(SCORER, RULES[name], pack([document], seed=5, first=i), Samples([1]))
        assert torch.equal(whole["action"][i + (i > 0), : len(document)], alone["action"][0])


# --- leaks ---


def played(rule: Rule, data: bytes, until: int) -> Tensor:
    """Decisions 0 .. until of ``data``, alone in its batch."""
    return unroll(SCORER, rule, pack([data]), Samples([1]))[0]["action"][0, : until + 1]


words = st.lists(st.sampled_from(LANGUAGE.words), min_size=1, max_size=5).map(b"".join)
marks = st.lists(st.sampled_from([b" ", b"\n", b"a", b".", "é".encode(), b"\x80"]), min_size=1, max_size=10).map(b"".join)
pasts = st.one_of(st.binary(min_size=1, max_size=12), words, marks)
futures = st.one_of(marks, words, st.binary(min_size=1, max_size=12))  # the byte at n itself is of every class in turn


@pytest.mark.parametrize("name", CAUSAL)
@settings(max_examples=40)
@given(past=pasts, one=futures, other=futures)
def test_no_causal_rule_reads_the_future(name: str, past: bytes, one: bytes, other: bytes) -> None:
    """a[n] is decided on x[<n]: the decisions up to n, itself included, are the same whatever follows, be it longer or shorter."""
    n = len(past)
    assert torch.equal(played(RULES[name], past + one, n), played(RULES[name], past + other, n))


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_the_same_test_finds_what_is_flagged(name: str) -> None:
    leaks = 0
    for n in range(1, 60):
        past, following = TEXT[:n], TEXT[n : n + 30]
        leaks += not torch.equal(played(RULES[name], past + following, n), played(RULES[name], past + b"\x00", n))
    assert leaks > 5


@pytest.mark.parametrize("name", RULES)
def test_what_is_not_causal_says_so_and_is_not_stepped(name: str) -> None:
    rule = RULES[name]
    assert is_causal(rule) == rule.causal == hasattr(rule, "step")
    assert rule.rate_is in ("given", "mean", "exact", "calibrated")
    if rule.causal:
        Actor(rule, SCORER)
        assert not note(rule)
        return
    assert note(rule).startswith("NOT CAUSAL")
    with pytest.raises(UserError, match=f"^{type(rule).__name__} is not causal: it cannot decide a byte at a time; use unroll"):
        Actor(rule, SCORER)


def test_the_rules_of_text_are_those_that_read_it() -> None:
    assert {name for name, rule in RULES.items() if rule.needs_text} == {"whitespace", "whitespace_first", "spacebyte", "lines", "bpe"}


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.2, float("nan")])
def test_no_other_rate(rate: float) -> None:
    for rule in (ExactRandom, Entropy):
        with pytest.raises(UserError, match="strictly between 0 and 1"):
            rule(rate)


def test_no_truth_where_none_is_known() -> None:
    with pytest.raises(UserError, match="CountingStream has no known word starts: agent=truth is for data=made_up and diagnostic=words"):
        KnownWords(CountingStream(5, 0.3))
