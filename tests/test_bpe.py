"""BPE-guided boundaries: the tokenizer is the train split's, any bytes will do, and how far prefixes are unstable is measured."""

import pytest
import torch

from agents.bpe import BpeGuided, instability, make_tokenizer, train_merges
from agents.data import training_bytes
from segment_env.errors import UserError
from segment_env.streams import Corpus, MadeUpLanguage, moby_dick

VOCABULARY = 512


@pytest.fixture(scope="module")
def rule() -> BpeGuided:
    """Trained on the embedded text."""
    made = BpeGuided(VOCABULARY)
    made.read_training(training_bytes(moby_dick(), 512, 0))
    return made


def pieces(rule: BpeGuided, data: bytes) -> list[bytes]:
    (starts,) = rule.token_starts([data])
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


def test_merges_by_hand() -> None:
    """Pairs of "abab abab ab": ab comes five times and is joined first, then abab twice, or " ab" twice: the earlier in the alphabet."""
    merges = train_merges([b"abab abab ab"], 1)
    assert merges == [(ord("a"), ord("b"))]
    rule = BpeGuided(258)
    rule.merges.copy_(torch.tensor([[ord("a"), ord("b")], [256, 256]]))
    assert pieces(rule, b"abab aba b") == [b"abab", b" ", b"ab", b"a", b" ", b"b"]


def test_a_start_is_the_byte_after_a_tokens_first() -> None:
    rule = BpeGuided(258)
    rule.merges.copy_(torch.tensor([[ord("a"), ord("b")], [256, 256]]))
    x = torch.tensor([list(b"abab aba b")])
    # tokens     abab|_|ab|a|_|b         first bytes at 0, 4, 5, 7, 8, 9
    assert rule.parallel(None, x, None).action.nonzero()[:, 1].tolist() == [1, 5, 6, 8, 9]


def test_tokens_reach_over_no_piece(rule: BpeGuided) -> None:
    for data in (b"the whale, the Whale! 1851 and\n\n  the sea", "où est-il allé ?".encode()):
        found = pieces(rule, data)
        assert b"".join(found) == data
        assert not any(b" " in piece[1:] and piece.strip() for piece in found)
        assert len(found) < len(data)
    assert b" the" in pieces(rule, b"of the whale")


@pytest.mark.parametrize("data", [bytes(range(256)), "私は猫である".encode()[1:], b"\x85\xa0\xff\xfe\x00", "🐋".encode()[2:], b"\xe2\x80"])
def test_any_bytes_will_do(rule: BpeGuided, data: bytes) -> None:
    assert b"".join(pieces(rule, data)) == data
    x = torch.tensor([list(data)])
    starts = [0, *(t for t in rule.parallel(None, x, None).action[0].nonzero().squeeze(-1).tolist())]
    assert starts == [0] + [start + 1 for start in rule.token_starts([data])[0] if start + 1 < len(data)]


def test_padding_is_not_read() -> None:
    """cd is joined before bc, and abc from a and bc: abc is a token, but not where a d follows."""
    a, b, c, d = b"abcd"
    rule = BpeGuided(259)
    rule.merges.copy_(torch.tensor([[c, d], [b, c], [a, 257]]))
    x = torch.tensor([list(b"abcd")] * 2)
    valid = torch.tensor([[True, True, True, False], [True] * 4])
    assert rule.parallel(None, x, None, valid=valid).action[:, :3].tolist() == [[False, True, False], [False, True, True]]


def test_rows_of_one_sequence_are_tokenized_once(rule: BpeGuided, monkeypatch) -> None:
    asked = []
    original = rule.token_starts
    monkeypatch.setattr(rule, "token_starts", lambda rows: asked.extend(rows) or original(rows))
    x = torch.tensor([list(b"the whale"), list(b"the whale"), list(b"a sailor.")])
    action = rule.parallel(None, x, None).action
    assert asked == [b"the whale", b"a sailor."]
    assert torch.equal(action[0], action[1]) and not torch.equal(action[0], action[2])


def test_the_same_text_gives_the_same_tokenizer_and_other_text_another() -> None:
    text = moby_dick().split("train")[:200_000].numpy().tobytes()
    first, again, other = (train_merges(chunks, 100) for chunks in ([text], [text], [text[100_000:]]))
    assert first == again != other


def test_only_the_train_split_is_read() -> None:
    """Held-out bytes of another alphabet leave no trace: no merge has one of them."""
    corpus = Corpus("two halves", b"sea whale " * 900 + b"QXZJ" * 250, (0.9, 0.05, 0.05))
    assert b"Q" not in b"".join(training_bytes(corpus, 64, 0))
    rule = BpeGuided(300)
    rule.read_training(training_bytes(corpus, 64, 0))
    assert not set(rule.merges.flatten().tolist()) & set(b"QXZJ")
    language = MadeUpLanguage()
    chunks = list(training_bytes(language, 512, seed=3))
    assert sum(map(len, chunks)) == 1 << 20 and len(set(map(len, chunks))) == 1


def test_fewer_merges_than_were_asked_for() -> None:
    rule = BpeGuided(1000)
    rule.read_training([b"ab ab ab"])
    assert 0 < (rule.merges[:, 0] >= 0).sum() < 10
    assert pieces(rule, b"xab ab")[-1] == b" ab"


def test_two_merges_that_spell_one_token() -> None:
    """abc from ab + c and from a + bc: ids are those of ``merges``, however many names there are."""
    a, b, c = b"abc"
    rule = BpeGuided(261)
    rule.merges.copy_(torch.tensor([[b, c], [a, 256], [a, b], [258, c], [259, 257]]))
    assert pieces(rule, b"abcabc") == [b"abcabc"]
    assert make_tokenizer(rule.merges.tolist()).get_vocab_size() == 256 + 4


def test_it_survives_saving_and_loading(rule: BpeGuided) -> None:
    other = BpeGuided(VOCABULARY)
    other.read_training([b"something else, something else"])
    data = b"Call me Ishmael. Some years ago"
    assert pieces(other, data) != pieces(rule, data)
    other.load_state_dict(rule.state_dict())
    assert pieces(other, data) == pieces(rule, data)


def test_prefixes_are_unstable(rule: BpeGuided) -> None:
    """By hand with the merge ab alone: after "a" a token has begun, and does so after "ab" too; after "aab" the third byte began none."""
    by_hand = BpeGuided(257)
    by_hand.merges.copy_(torch.tensor([[ord("a"), ord("b")]]))
    assert instability(by_hand, b"a b a b") == 0
    assert instability(by_hand, b"abab") == 0  # a token's first byte is known as such: only ab can follow a
    three = BpeGuided(258)
    three.merges.copy_(torch.tensor([[ord("b"), ord("c")], [ord("a"), 256]]))
    # abcd whole: abc|d, so a[1], a[4]; cut off after ab: a|b says that b begins a token, so a[2] changes; a[1], a[3] do not
    assert instability(three, b"abcd") == pytest.approx(1 / 3)
    text = moby_dick().split("validation")[:600].numpy().tobytes()
    assert 0.02 < instability(rule, text) < 0.3
    with pytest.raises(ValueError, match="from two bytes on"):
        instability(rule, b"a")


@pytest.mark.parametrize("vocabulary", [0, 256, -5, 300.5, True])
def test_no_other_vocabulary(vocabulary: object) -> None:
    with pytest.raises(UserError, match="must be a whole number above 256, as the bytes are in it"):
        BpeGuided(vocabulary)


def test_before_training() -> None:
    with pytest.raises(UserError, match="not trained yet"):
        BpeGuided().parallel(None, torch.zeros(1, 3, dtype=torch.int64), None)
    for nothing in ([], [b""], [b"abc"]):
        with pytest.raises(UserError, match="too short for a BPE vocabulary"):
            BpeGuided().read_training(nothing)
