"""What is fixed before a decision is taken: the bytes of a batch of sequences, and which rows sample each of them.

Letters: S sequences, K boundary samples of a sequence (it may differ between sequences), B rows = sum of K, T bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from segment_env.noise import action_noise


class ByteStream(Protocol):
    """A source of byte sequences, a pure function of (seed, global sequence index)."""

    unit: str  #: what one element is: "byte" of text or "sample" of sound
    sample_rate: float | None  #: elements per second, where that means something

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """The sequences of global ``index`` [S] int64, ``length`` = T.

        Returns: bytes [S, T] int64 in 0..255; valid [S, T] bool, a non-empty prefix of every row; terminated [S] bool: True
        where the document ends with the sequence, False where the crop does.
        """
        ...

    def reference(self, x: Tensor) -> Tensor | None:
        """True starts of bytes ``x`` [S, T]: [S, T] bool, True at t = 0; what alignment is measured against. None: there is no truth."""
        ...


@dataclass(frozen=True)
class Batch:
    """S sequences of at most T bytes: the exogenous part of S episodes."""

    bytes: Tensor  #: [S, T] int64 in 0..255
    valid: Tensor  #: [S, T] bool, True at real bytes: a prefix of every row
    terminated: Tensor  #: [S] bool, True where the document ends with the sequence, False where the crop does
    sequence: Tensor  #: [S] int64, global index of the sequence: with the seed it fixes the noise of its rows
    seed: int  #: of the noise

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device; to a GPU from pinned memory, so that the host goes on while it is copied."""
        tensors = (self.bytes, self.valid, self.terminated, self.sequence)
        if torch.device(device).type == "cuda":
            tensors = tuple(tensor if tensor.is_cuda else tensor.pin_memory() for tensor in tensors)  # type: ignore[assignment]
        x, valid, terminated, sequence = (tensor.to(device, non_blocking=True) for tensor in tensors)
        return Batch(x, valid, terminated, sequence, self.seed)


def pack(documents: Sequence[bytes], seed: int = 0, first: int = 0, length: int | None = None) -> Batch:
    """Whole documents as one padded batch: terminated, T the longest or ``length``, which none may exceed.

    Raises ValueError on an empty document or list.
    """
    if not documents or not all(documents):
        raise ValueError("a batch needs at least one document, and every document at least one byte")
    length = length or max(map(len, documents))
    count = torch.tensor([len(document) for document in documents])
    padded = b"".join(document.ljust(length, b"\0") for document in documents)
    x = torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(len(documents), length).long()
    index = torch.arange(first, first + len(documents))
    return Batch(x, torch.arange(length) < count[:, None], torch.ones(len(documents), dtype=torch.bool), index, seed)


class Samples:
    """How many boundary samples each sequence gets: rows are sequence-major, the K rows of a sequence are adjacent.

    Args: ``counts`` K of every sequence, all >= 1; ``antithetic``: samples 2i and 2i + 1 act on u and 1 - u.

    >>> Samples([2, 1]).row.tolist(), Samples([2, 1]).sample.tolist()
    ([0, 0, 1], [0, 1, 0])
    """

    def __init__(self, counts: Sequence[int], antithetic: bool = False, device: torch.device | str = "cpu"):
        if not counts or min(counts) < 1:
            raise ValueError(f"every sequence needs at least one boundary sample, got {list(counts)}")
        self.counts, self.antithetic = tuple(counts), antithetic
        self.row = torch.tensor([s for s, k in enumerate(counts) for _ in range(k)], device=device)  #: [B] sequence of each row
        self.sample = torch.tensor([i for k in counts for i in range(k)], device=device)  #: [B] which of its K samples a row is
        self.single = max(counts) == 1  #: True where rows are sequences, and expanding costs nothing

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.counts)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.row)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[S, ...] -> [B, ...]: what belongs to a sequence, given to each of its rows."""
        return per_sequence if self.single else per_sequence.index_select(0, self.row)

    def noise(self, batch: Batch, length: int) -> Tensor:
        """The u[t] of every row: [B, length] float32 in (0, 1)."""
        return action_noise(batch.seed, self.expand(batch.sequence), self.sample, length, self.antithetic)


@dataclass(frozen=True)
class Episodes:
    """Which sequence plays where: slot s plays sequence ``n * total + first + s`` in its n-th episode.

    Nothing but n need be kept in a checkpoint.
    """

    stream: ByteStream
    num_sequences: int  #: S slots of this rank
    length: int  #: T of a crop
    seed: int  #: of bytes and noise
    first: int = 0  #: first slot of this rank among those of all ranks
    total: int | None = None  #: slots of all ranks; None: this rank is the only one

    def batch(self, episode: int | Tensor) -> Batch:
        """The batch of the n-th episodes; ``episode`` is n, one for all slots or [S] int64."""
        index = episode * (self.total or self.num_sequences) + self.first + torch.arange(self.num_sequences)
        return Batch(*self.stream.sequences(self.seed, index, self.length), index, self.seed)


class Batches(Protocol):
    """Batches to train on, one after the other, and where in the data the next one begins."""

    def __next__(self) -> Batch:
        """The next batch; there is always one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps to go on behind the last batch that was taken, as JSON can hold it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises UserError where it is one of other data."""
        ...


class EpisodeBatches:
    """The batches of all slots' n-th episodes, n = 0, 1, ...: the state is n."""

    def __init__(self, episodes: Episodes):
        self.episodes = episodes
        self._next = 0

    def __next__(self) -> Batch:
        self._next += 1
        return self.episodes.batch(self._next - 1)

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Batches`."""
        return {"batches": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Batches`."""
        self._next = state["batches"]
