"""What segments are like over held-out bytes: how long, which ones, and next to which kinds of bytes they start.

Letters: B rows, T bytes, C classes of bytes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from segment_env.batch import Batch, Samples
from segment_env.boundaries import split
from segment_env.metrics import segment_lengths
from segment_env.scorer import Policy, Scorer
from segment_env.unroll import unroll

#: Of bytes of text: each class takes what those before it have left.
TEXT_CLASSES: dict[str, Iterable[int]] = {
    "a–z": range(0x61, 0x7B),
    "A–Z": range(0x41, 0x5B),
    "0–9": range(0x30, 0x3A),
    "space": [0x20],
    "tab, line end": range(0x09, 0x0E),
    "punctuation": range(0x21, 0x7F),
    "UTF-8 first": range(0xC2, 0xF5),
    "UTF-8 later": range(0x80, 0xC0),
    "other": range(256),
}
#: Of samples, as those of sound: eight equal ranges of the value.
SAMPLE_CLASSES: dict[str, Iterable[int]] = {f"{low}–{low + 31}": range(low, low + 32) for low in range(0, 256, 32)}


@dataclass
class Anatomy:
    """Counts over all that was read; a crop's end ends a segment."""

    lengths: Counter[int]  #: segments by bytes
    segments: Counter[bytes]
    classes: list[str]  #: those that occur
    choices: Tensor  #: [C, C] int64, positions by the class of the byte before (row) and of the byte itself (column)
    cuts: Tensor  #: [C, C] int64, those of them that are starts


@torch.no_grad()
def examine(scorer: Scorer, policy: Policy, batches: Iterable[Batch], text: bool = True, device: torch.device | str = "cpu") -> Anatomy:
    """One seeded draw of boundaries, uncapped, over ``batches`` of ``text``, or of samples."""
    named = TEXT_CLASSES if text else SAMPLE_CLASSES
    kind, size = _kinds(named).to(device), len(named)
    lengths: Counter[int] = Counter()
    segments: Counter[bytes] = Counter()
    choices, cuts = (torch.zeros(size * size, dtype=torch.int64) for _ in range(2))
    for batch in batches:
        batch = batch.to(device)
        rollout, _ = unroll(scorer, policy, batch, Samples([1] * len(batch.bytes), device=device))
        starts, choice = rollout["action"].bool(), rollout["is_choice"]
        for row, valid, start in zip(batch.bytes.cpu(), batch.valid.cpu(), starts.cpu(), strict=True):
            segments.update(split(bytes(row[valid].tolist()), start[valid]))
        lengths.update(segment_lengths(starts, batch.valid).tolist())
        kinds = kind[batch.bytes]
        pair = kinds.roll(1, 1) * size + kinds  # at t = 0, which is no choice, the byte before is another's
        choices += torch.bincount(pair[choice], minlength=size * size).cpu()
        cuts += torch.bincount(pair[choice & starts], minlength=size * size).cpu()
    choices, cuts = choices.view(size, size), cuts.view(size, size)
    there = (choices.sum(0) + choices.sum(1)) > 0
    names = [name for name, occurs in zip(named, there.tolist(), strict=True) if occurs]
    return Anatomy(lengths, segments, names, choices[there][:, there], cuts[there][:, there])


def _kinds(named: dict[str, Iterable[int]]) -> Tensor:
    """[256] int64: the class of every byte."""
    kind = torch.full((256,), -1)
    for number, values in enumerate(named.values()):
        for value in values:
            if kind[value] < 0:
                kind[value] = number
    return kind
