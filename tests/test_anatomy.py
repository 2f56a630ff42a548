"""Segments and rates by class of byte, counted by hand."""

import torch

from agents.anatomy import SAMPLE_CLASSES, TEXT_CLASSES, _kinds, examine
from agents.rules import UniformStride
from models import ByteUNet, Size
from segment_env.batch import pack

MODEL = ByteUNet(Size(width=16, heads=2, encoder=1, mid=1, decoder=1, window=4))


def test_counts_over_padded_documents() -> None:
    found = examine(MODEL, UniformStride(2), [pack([b"ab ab a", b"a1"]), pack([b"B"])])
    assert found.segments == {b"ab": 1, b" a": 1, b"b ": 1, b"a": 1, b"a1": 1, b"B": 1}
    assert found.lengths == {2: 4, 1: 2}
    pairs = {
        (before, byte): (int(found.cuts[i, j]), int(found.choices[i, j]))
        for i, before in enumerate(found.classes)
        for j, byte in enumerate(found.classes)
        if found.choices[i, j]
    }
    assert pairs == {("a–z", "a–z"): (1, 2), ("a–z", "space"): (1, 2), ("space", "a–z"): (1, 2), ("a–z", "0–9"): (0, 1)}
    assert found.classes == ["a–z", "0–9", "space"], "the first byte is no choice, and what follows nothing is of no class before it"


def test_classes_of_samples() -> None:
    found = examine(MODEL, UniformStride(1), [pack([bytes([0, 31, 32, 255])])], text=False)
    assert found.classes == ["0–31", "32–63", "224–255"]
    assert found.choices.tolist() == found.cuts.tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_every_byte_has_a_class() -> None:
    for named in (TEXT_CLASSES, SAMPLE_CLASSES):
        assert torch.bincount(_kinds(named), minlength=len(named)).min() > 0 and _kinds(named).min() == 0
    kinds = [list(TEXT_CLASSES)[_kinds(TEXT_CLASSES)[byte]] for byte in b"aZ5 \n.\xc3\xa9\xff\x00\x7f"]
    assert kinds == ["a–z", "A–Z", "0–9", "space", "tab, line end", "punctuation", "UTF-8 first", "UTF-8 later", *["other"] * 3]
