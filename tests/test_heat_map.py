"""Cells of heat maps: every byte in one, shown as what it is, with the probability that it was decided by."""

from io import BytesIO

import matplotlib.image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agents import pages, pictures, plots
from agents.heat_map import MARKS, Cell, Decided, cells, decide, excerpt, width
from agents.policies import WindowPolicy
from agents.rules import UniformStride
from models import ByteUNet, Size
from segment_env.errors import UserError

SMALL = Size(width=16, heads=2, encoder=1, mid=1, decoder=1, window=4)


def decided(data: bytes) -> Decided:
    return Decided(data, tuple(n / max(len(data), 1) for n in range(len(data))), tuple(n % 2 == 0 for n in range(len(data))))


@given(st.binary(max_size=60) | st.text(max_size=30).map(lambda text: text.encode("utf-8", "surrogatepass")), st.booleans())
def test_cells_hold_every_byte_once_and_nothing_unprintable(data: bytes, text: bool) -> None:
    whole = decided(data)
    made = cells(whole, text)
    assert b"".join(cell.data for cell in made) == data
    assert tuple(p for cell in made for p in cell.probabilities) == whole.probabilities
    assert tuple(start for cell in made for start in cell.starts) == whole.starts
    assert [cell.offset for cell in made] == [sum(len(cell.data) for cell in made[:n]) for n in range(len(made))]
    assert all(cell.text.isprintable() and width(cell) > 0 for cell in made)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"a b", ["a", " ", "b"]),
        ("é€😀".encode(), ["é", "€", "😀"]),
        ("e\u0301x".encode(), ["e\u0301", "x"]),
        ("\u0301x".encode(), ["\\u0301", "x"]),
        (("e" + "\u0301" * (MARKS + 2)).encode(), ["e" + "\u0301" * MARKS, "\\u0301", "\\u0301"]),
        (b"\xe2\x80x", ["\\xe2", "\\x80", "x"]),
        (b"\n\x00\t", ["\\n", "\\x00", "\\t"]),
        ("\u202e\u2028\xa0".encode(), ["\\u202e", "\\u2028", "\\xa0"]),
        (b"\\n", ["\\", "n"]),
    ],
)
def test_what_is_shown(data: bytes, shown: list[str]) -> None:
    made = cells(decided(data))
    assert [cell.text for cell in made] == shown
    assert [cell.escaped for cell in made] == [text.startswith("\\") and len(text) > 1 for text in shown]


def test_samples_are_digits() -> None:
    assert [cell.text for cell in cells(decided(b"a\x00\n"), text=False)] == ["61", "00", "0a"]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("ab, cd", "      "),
        ("שלום, עולם", "rrrrrrrrrr"),  # what stands between two Hebrew words is theirs
        ("שלום 12 ab cd.", "rrrrr  r     r"),  # digits are read from the left; the line itself runs from the right
        ("ab שלום cd", "   rrrr   "),
        ("ab שלום, עולם.", "   rrrrrrrrrr "),
        ("ab\nשלום!", "   rrrrr"),  # each line for itself
    ],
)
def test_direction_of_reading(text: str, right: str) -> None:
    assert "".join("r" if cell.right_to_left else " " for cell in cells(decided(text.encode()))) == right


def test_probabilities_are_those_of_the_draw() -> None:
    torch.manual_seed(0)
    model = ByteUNet(SMALL)
    policy = WindowPolicy(model.width, logit_scale=1)
    torch.nn.init.normal_(policy.weight)
    data = bytes(range(256)) * 8
    found = decide(model, policy, data, seed=3)
    expected = policy.parallel(model.encode(torch.tensor([list(data)]))[:, :-1], torch.tensor([list(data)]), torch.ones(1, 2048)).logits
    assert found.data == data and found.probabilities[0] == 1 and found.starts[0]
    assert torch.tensor(found.probabilities[1:]).allclose(expected[0, 1:].sigmoid(), atol=1e-5)
    assert sum(found.starts) == pytest.approx(sum(found.probabilities), abs=5 * 2048**0.5 / 2)  # 5 standard deviations at most
    assert found[3:5] == Decided(data[3:5], found.probabilities[3:5], found.starts[3:5])
    assert decide(model, policy, b"") == Decided(b"", (), ())


def test_a_rule_leaves_nothing_to_chance() -> None:
    found = decide(ByteUNet(SMALL), UniformStride(3), b"abcdefg")
    assert found.probabilities == (1, 0, 0, 1, 0, 0, 1) and found.starts == (True, False, False, True, False, False, True)


@given(st.binary(max_size=80), st.integers(1, 40))
def test_an_excerpt_is_a_part_that_is_not_too_long(data: bytes, length: int) -> None:
    part = data[excerpt(data, length)]
    assert part in data and len(part) <= length and bool(part) == bool(data)


def test_bars_of_a_character_run_as_it_is_read() -> None:
    left, right = (Cell("x", b"ab", 0, (0.25, 1.0), (True, False), False, False, turned) for turned in (False, True))
    bar = "linear-gradient(var(--heat) 0 0) {}% 100%/50.0% {}px no-repeat"
    rule = "linear-gradient(var(--rule) 0 0) {}% 0/1.5px 100% no-repeat"
    assert pages.bars(left) == ",".join([rule.format(0), bar.format(0, 2.2), bar.format(100, "9.0")])
    assert pages.bars(right) == ",".join([rule.format(100), bar.format(100, 2.2), bar.format(0, "9.0")])
    assert pages.hover(left) == "bytes 0–1: 61 62; p = 0.25 1.00"


def test_a_picture_is_drawn_whatever_the_text(recwarn: pytest.WarningsRecorder) -> None:
    text = "Call me $x^2$ שלום 日本 \n\u202e".encode() + b"\xff" + b"word " * 60
    picture = plots.png(pictures.draw([("before", cells(decided(text))), ("<b>$after$</b>", cells(decided(text)))], note="a note"))
    pixels = matplotlib.image.imread(BytesIO(picture))
    assert pixels.shape[1] > 800 and pixels.std() > 0.05
    assert not recwarn.list, "every glyph is there"


def test_a_picture_of_nothing_and_one_too_large() -> None:
    assert plots.png(pictures.draw([("", [])]))
    with pytest.raises(UserError, match="at most 8,192 characters, got 9,000; use --html"):
        pictures.draw([("", cells(decided(b"x" * 9000)))])
