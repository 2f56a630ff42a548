"""Words: a made-up language without delimiters; a cut pays at the start of a word, which the words before it give away.

Letters: S sequences, T bytes, N nodes of the trie = D contexts, L bytes of the longest word.
"""

import torch
from torch import Tensor

from segment_env.boundaries import NUM_BYTES
from segment_env.diagnostics.base import Aligned
from segment_env.streams.made_up import MadeUpLanguage, parse


class Words(Aligned):
    """A :class:`~segment_env.streams.made_up.MadeUpLanguage` of few words, and a scorer that knows its trie.

    No word begins another one, so whoever has read from the first byte on knows the node of the trie, which ``h`` is one-hot in: node 0
    where a word starts, node 1 once the bytes are not of the language. Where the current segment began with the current word (the
    bytes since the last start are as many as the node has letters) the next byte is predicted by its true distribution p(b | node);
    elsewhere, and at the early head always, by the distribution q(b) of all letters of the language. Let P(node) be the chance that a
    word passes a node. Then G of :class:`~segment_env.diagnostics.base.Aligned` and M are::

        G[k] = sum over nodes of k letters of P(node) KL(p(. | node) || q)                       nats, never negative
        M    = sum over nodes of P(node), the mean length of a word

        oracle: cut where a word starts            (sum_k G[k] - c) / M                          nats per byte, c the price
        independent cuts at rate r                 sum_k G[k] r (1 - r)^k / M - c r
        never                                      0
        always                                     G[0] / M - c

    The oracle's rate is 1 / M; it is the one best policy while c < sum_k G[k]. With the defaults, at the default price of 0.5:
    oracle 2.333, always -0.371; at the oracle's rate of 0.205 random cuts give 0.192.

    Args: ``lexicon_size``, ``min_length``, ``max_length``, ``exponent`` and ``seed`` of the language; ``leak`` in (0, 1), the probability
    of bytes that never come; ``dtype`` float32 or float64. Raises UserError where such a lexicon cannot be, or outside these.
    """

    def __init__(
        self,
        lexicon_size: int = 24,
        min_length: int = 2,
        max_length: int = 7,
        exponent: float = 1.0,
        seed: int = 0,
        leak: float = 0.01,
        dtype: torch.dtype = torch.float32,
    ):
        language = MadeUpLanguage(lexicon_size, min_length, max_length, exponent, seed)
        mass, depth = _passing(language)
        nodes, blurred = torch.arange(len(mass)), len(mass)
        passing = mass.sum(-1, keepdim=True)
        conditional = torch.where(passing > 0, mass / passing, 1 / NUM_BYTES)
        marginal = mass.sum(0) / mass.sum()
        row = torch.full((len(mass), max_length + 1), blurred)  # the last column stands for all longer segments
        alive = passing[:, 0] > 0
        row[nodes[alive], depth[alive]] = nodes[alive]
        super().__init__(
            step=language.trie,
            context=nodes,
            row=row,
            early=torch.full_like(nodes, blurred),
            probability=torch.cat([conditional, marginal[None]]),
            leak=leak,
            oracle=nodes == 0,
            settled=max_length,
            dtype=dtype,
        )
        gain = torch.xlogy(mass, conditional / marginal.clamp(min=1e-300)).sum(-1)  # [N], P(node) KL
        self.language = language
        self.gain = torch.zeros(max_length, dtype=torch.float64).index_add(0, depth, gain).tolist()
        self.mean_length = float(mass.sum())

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`segment_env.batch.ByteStream`; always full, never terminated, and results are on the CPU."""
        return self.language.sequences(seed, index, length)

    def nodes(self, x: Tensor) -> Tensor:
        """The node of the trie at every position, from x[<t]: ``x`` [S, T] -> [S, T+1] int64."""
        return parse(self.step, self.settled, x)


def _passing(language: MadeUpLanguage) -> tuple[Tensor, Tensor]:
    """Chance [N, 256] that a word passes a node and goes on with a byte; letters [N] that lead to a node, 0 at node 1."""
    mass, depth = torch.zeros(language.trie.shape, dtype=torch.float64), torch.zeros(len(language.trie), dtype=torch.int64)
    for word, frequency in zip(language.words, language.frequency, strict=True):
        node = 0
        for letters, letter in enumerate(word):
            depth[node] = letters
            mass[node, letter] += frequency
            node = int(language.trie[node, letter])
    return mass, depth
