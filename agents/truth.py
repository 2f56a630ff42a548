"""The truth as a rule, where it is known.

Letters: B rows, T bytes.
"""

from typing import Any

import torch
from torch import Tensor

from agents.rules import Rule
from segment_env.boundaries import BOS
from segment_env.errors import UserError
from segment_env.scorer import Decision, Observation
from segment_env.streams.made_up import parse


class KnownWords(Rule):
    """a[t] = a word of a made-up language starts at t, which x[<t] gives away: see :class:`segment_env.streams.MadeUpLanguage`.

    Args: ``source``, such a language, or a problem with a ``language`` in it. Raises UserError on any other source.
    """

    trie: Tensor

    def __init__(self, source: Any):
        super().__init__()
        language = getattr(source, "language", source)
        if not hasattr(language, "trie"):
            raise UserError(f"{type(source).__name__} has no known word starts: agent=truth is for data=made_up and diagnostic=words")
        self.register_buffer("trie", language.trie.clone(), persistent=False)
        self.longest = max(map(len, language.words))

    def parallel(self, h: Tensor, x: Tensor, noise: Tensor, early_log_p: Tensor | None = None, **_) -> Decision:
        """Decide all positions: x [B, T]."""
        return Decision(parse(self.trie, self.longest, x)[:, :-1] == 0, None)

    def init(self, num_rows: int) -> Tensor:
        """The node of the trie: [B] int64."""
        return torch.zeros(num_rows, dtype=torch.int64, device=self.trie.device)

    def step(self, state: Tensor, observation: Observation, **_) -> tuple[Tensor, Decision]:
        """Decide one position."""
        byte = observation.byte
        node = torch.where(byte == BOS, 0, self.trie[state, byte.clamp(max=BOS - 1)])
        return node, Decision(node == 0, None)
