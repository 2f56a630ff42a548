"""Boundaries of a BPE tokenizer, a byte late: what most language models read, as a rule.

Bytes stand in the tokenizer as the characters U+0000 to U+00FF, so that any bytes will do: text cut inside a character, or sound.

Letters: B rows, T bytes, V tokens of the vocabulary, M = V - 256 merges.
"""

import json
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from agents.rules import Rule
from segment_env.boundaries import NUM_BYTES
from segment_env.errors import UserError
from segment_env.scorer import Decision

# No token reaches over these pieces: a word or number with the space before it, marks, white space. Every byte above ASCII counts as
# a letter, as it is part of one in most scripts.
_SPACE, _LETTERS = r" \t\n\v\f\r", "A-Za-z\u0080-\u00ff"
_PIECES = Regex(f" ?[{_LETTERS}]+| ?[0-9]+| ?[^{_SPACE}{_LETTERS}0-9]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+")
_NONE = -1  # stands where a training text was too short for all merges


class BpeGuided(Rule):
    """a[t] = byte t-1 is the first byte of a BPE token: only then is it known that the token before it has ended.

    The BPE-guided baseline of arXiv 2602.13940. NOT causal: how bytes are cut into tokens depends on the bytes that follow, and so a[t]
    on x[>=t]; :func:`instability` measures how often. The merges are a buffer, and so in every checkpoint. Tokenizing runs on the
    host, once per sequence: its rows share the bytes.

    Args: ``vocabulary`` V, bytes included. Raises UserError where it leaves no merges; before :meth:`read_training` it cannot decide.
    """

    causal = False
    needs_text = True
    rate_is = "given"

    merges: Tensor  #: [M, 2] int64, tokens joined: 0..255 are the bytes, 256 + i is what merge i makes

    def __init__(self, vocabulary: int = 8192):
        super().__init__()
        if type(vocabulary) is not int or vocabulary <= NUM_BYTES:
            raise UserError(
                f"agent.policy.vocabulary must be a whole number above {NUM_BYTES}, as the bytes are in it, got {vocabulary!r}: try 8192"
            )
        self.register_buffer("merges", torch.full((vocabulary - NUM_BYTES, 2), _NONE))
        self._tokenizer: Tokenizer | None = None

    def read_training(self, chunks: Iterable[bytes]) -> None:
        """Learn the merges from bytes of the train split. Raises UserError where nothing in them repeats."""
        learnt = train_merges(chunks, len(self.merges))
        if not learnt:
            raise UserError("the train split is too short for a BPE vocabulary: no pair of bytes comes twice in it")
        self.merges.fill_(_NONE)[: len(learnt)] = torch.tensor(learnt, device=self.merges.device)
        self._tokenizer = None

    def parallel(
        self, h: Tensor, x: Tensor, noise: Tensor, early_log_p: Tensor | None = None, *, valid: Tensor | None = None, **_
    ) -> Decision:
        """Decide all positions: x [B, T], of which padding, ``valid`` False, is not read."""
        lengths = [x.shape[1]] * len(x) if valid is None else valid.sum(1).tolist()
        rows = [row[:n].tobytes() for row, n in zip(x.cpu().numpy().astype(np.uint8), lengths, strict=True)]
        distinct = {row: i for i, row in enumerate(dict.fromkeys(rows))}
        starts = torch.zeros(len(distinct), x.shape[1] + 1, dtype=torch.bool)
        for own, found in zip(starts, self.token_starts(list(distinct)), strict=True):
            own[[start + 1 for start in found]] = True
        return Decision(starts[[distinct[row] for row in rows], :-1].to(x.device), None)

    def token_starts(self, rows: Sequence[bytes]) -> list[list[int]]:
        """Indices of the first byte of every token, row by row. Raises UserError before training."""
        if self._tokenizer is None:
            merges = self.merges[self.merges[:, 0] != _NONE].tolist()
            if not merges:
                raise UserError("the BPE tokenizer is not trained yet: give BpeGuided.read_training the bytes of the train split")
            self._tokenizer = make_tokenizer(merges)
        return [[start for start, _ in each.offsets] for each in self._tokenizer.encode_batch([row.decode("latin-1") for row in rows])]

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._tokenizer = None  # of other merges


def instability(rule: BpeGuided, data: bytes) -> float:
    """Share of the choices t of ``data`` at which a[t] turns out otherwise when the bytes from t on are cut off; 0 were it causal.

    It tokenizes every beginning of the data: the time grows with its square. Raises ValueError on fewer than two bytes.
    """
    if len(data) < 2:
        raise ValueError(f"there is a choice from two bytes on, got {len(data)}")
    (whole,), cut = rule.token_starts([data]), rule.token_starts([data[:t] for t in range(1, len(data))])
    after = {start + 1 for start in whole}
    changed = [(t in after) != (starts[-1] + 1 == t) for t, starts in enumerate(cut, 1)]
    return sum(changed) / len(changed)


def train_merges(chunks: Iterable[bytes], count: int) -> list[tuple[int, int]]:
    """The first ``count`` merges of BPE on ``chunks``, fewer where no more pairs repeat, as in ``BpeGuided.merges``."""
    tokenizer = _untrained(models.BPE())
    letters = [chr(byte) for byte in range(NUM_BYTES)]
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BYTES + count, min_frequency=2, initial_alphabet=letters, limit_alphabet=NUM_BYTES, show_progress=False
    )
    tokenizer.train_from_iterator((chunk.decode("latin-1") for chunk in chunks), trainer)
    learnt = json.loads(tokenizer.to_str())["model"]["merges"][:count]
    ids = {letter: byte for byte, letter in enumerate(letters)}
    for number, (left, right) in enumerate(learnt):
        ids.setdefault(left + right, NUM_BYTES + number)  # two merges may spell the same token
    return [(ids[left], ids[right]) for left, right in learnt]


def make_tokenizer(merges: Iterable[Sequence[int]]) -> Tokenizer:
    """The tokenizer of ``merges``, pairs of tokens as in ``BpeGuided.merges``; it reads bytes decoded as latin-1."""
    names = [chr(byte) for byte in range(NUM_BYTES)]
    pairs = []
    for left, right in merges:
        pairs.append((names[left], names[right]))
        names.append(names[left] + names[right])
    return _untrained(models.BPE(vocab={name: i for i, name in enumerate(dict.fromkeys(names))}, merges=pairs))


def _untrained(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(_PIECES, "isolated")
    return tokenizer
