"""Documents without end as batches: cut into crops, shuffled, read ahead, and resumed exactly where they were left.

A lane is the share of one worker of one rank. It goes through its documents for ever, cuts them into crops and fills a buffer with
them, which it then plays in a random order while the next one fills. All of that is a function of where the buffer begins in
the documents, its number, and how many of its crops were played: five integers, which are the lane's state. On a resume the
buffer is read again. (The shuffle buffer of ``datasets`` forgets its contents on a resume.)

Letters: S sequences, T bytes of a crop.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from segment_env.batch import Batch, pack
from segment_env.errors import UserError
from segment_env.noise import BYTES, hashed
from segment_env.streams.corpora import BETWEEN
from segment_env.streams.shards import Shards

_AHEAD = 4  #: batches of every worker that are made before they are asked for


class Place(NamedTuple):
    """Where a byte is: in which of a lane's turns, one shard each, in which document of that, how many bytes into it."""

    turn: int
    row: int
    offset: int


class Crop(NamedTuple):
    """A sequence of 1 to T bytes."""

    data: bytes
    terminated: bool  #: whether the document ends with it
    end: Place  #: of the first byte behind it


Placed = Iterable[tuple[Place, bytes]]  #: documents; the first one's offset may be inside it, that of the others is 0


def joined(documents: Placed, length: int) -> Iterator[Crop]:
    """One stream with a blank line between documents, in full crops; what is left at the end is no crop."""
    crop = b""
    for place, document in documents:
        data, at = document + BETWEEN, place.offset
        while at < len(data):
            piece = data[at : at + length - len(crop)]
            crop, at = crop + piece, at + len(piece)
            if len(crop) == length:
                yield Crop(crop, False, place._replace(offset=at))
                crop = b""


def separate(documents: Placed, length: int) -> Iterator[Crop]:
    """Every document by itself, from its beginning in crops, of which the last may be shorter."""
    for place, document in documents:
        for at in range(place.offset, len(document), length):
            end = min(at + length, len(document))
            yield Crop(document[at:end], end == len(document), place._replace(offset=end))


def beginnings(documents: Placed, length: int) -> Iterator[Crop]:
    """The first crop of every document alone."""
    for place, document in documents:
        if place.offset == 0:
            yield Crop(document[:length], len(document) <= length, place._replace(offset=len(document)))


#: how documents become crops
CUTS: dict[str, Callable[[Placed, int], Iterator[Crop]]] = {"joined": joined, "documents": separate, "beginnings": beginnings}


def pack_crops(crops: list[Crop], length: int, seed: int, first: int) -> Batch:
    """Crops as a batch [S, ``length``], whose sequences are numbered from ``first`` on."""
    batch = pack([crop.data for crop in crops], seed, first, length)
    return replace(batch, terminated=torch.tensor([crop.terminated for crop in crops]))


@dataclass(frozen=True)
class Reading:
    """What the lanes of a run have in common."""

    shards: Shards
    keep: Callable[[bytes], bool]  #: whether a document is one to train on
    cut: str  #: one of CUTS
    length: int  #: T
    buffer: int  #: crops that are shuffled together
    seed: int  #: of the order of shards and crops
    name: str  #: in error messages


class Lane:
    """The ``index``-th of ``total`` shares of the documents as an endless iterator of crops.

    Shards are dealt out to the lanes like cards, in an order that is new in every epoch and goes on from one epoch to the next, so that all
    are read equally often. Where there are fewer shards than lanes, every lane reads all of them and takes every total-th document.
    """

    def __init__(self, reading: Reading, index: int = 0, total: int = 1):
        self.reading, self.index, self.total = reading, index, total
        self._order: tuple[int, list[int]] = (-1, [])  # the last epoch, and its order of shards
        self.load_state([0, 0, 0, 0, 0])

    def state(self) -> list[int]:
        """Turn, row and offset of the buffer's first byte, the buffer's number, how many of its crops were played."""
        return [*self._begin, self._number, self._played]

    def load_state(self, state: list[int]) -> None:
        """Go on where ``state`` was taken."""
        turn, row, offset, self._number, self._played = state
        self._begin = Place(turn, row, offset)
        self._crops: Iterator[Crop] | None = None
        self._buffer: list[Crop] = []
        self._next_buffer: list[Crop] = []

    def __next__(self) -> Crop:
        size = self.reading.buffer
        if self._crops is None:
            self._crops = CUTS[self.reading.cut](self._documents(), self.reading.length)
            self._buffer = list(islice(self._crops, size))
            self._next_buffer = list(islice(self._crops, self._played))
            self._shuffled = self._shuffle()
        if self._played == size:
            self._begin, self._number, self._played = self._buffer[-1].end, self._number + 1, 0
            self._buffer, self._next_buffer = self._next_buffer, []
            self._shuffled = self._shuffle()
        self._next_buffer.append(next(self._crops))  # one for one: no batch waits until a whole buffer is read
        self._played += 1
        return self._buffer[self._shuffled[self._played - 1]]

    def _shuffle(self) -> list[int]:
        counters = torch.tensor(self.index), torch.tensor(self._number), torch.arange(self.reading.buffer)
        return hashed(self.reading.seed, BYTES, *counters).argsort().tolist()

    def _documents(self) -> Iterator[tuple[Place, bytes]]:
        """The lane's documents from the buffer's beginning on. Raises UserError where a whole round finds none."""
        shards, keep = self.reading.shards, self.reading.keep
        dealt = len(shards) >= self.total
        (turn, first, offset), idle = self._begin, 0
        while idle < len(shards):
            idle += 1
            shard = self._shard(turn * self.total + self.index if dealt else turn)
            for row, document in enumerate(shards.read(shard, first), first):
                if (dealt or row % self.total == self.index) and keep(document):
                    yield Place(turn, row, offset), document
                    idle = offset = 0
            turn, first = turn + 1, 0
        share = f" for worker {self.index + 1} of {self.total}" if self.total > 1 else ""
        raise UserError(f"{self.reading.name} holds no document to train on{share}; lower longer_than or workers, or use more data")

    def _shard(self, number: int) -> int:
        """The ``number``-th shard of the endless sequence of all epochs."""
        count = len(self.reading.shards)
        epoch, position = divmod(number, count)
        if self._order[0] != epoch:
            self._order = epoch, hashed(self.reading.seed, BYTES, torch.tensor(epoch), torch.arange(count)).argsort().tolist()
        return self._order[1][position]


class StreamedBatches:
    """Batches of the lanes in turn, see :class:`segment_env.batch.Batches`; with ``workers`` each lane has a thread that works ahead.

    A batch brings along where its lane stood behind it: what was made ahead and not taken is made again after a resume.

    Args: ``rank`` and ``world_size`` say which share of the documents and which sequence numbers are this rank's; ``workers`` 0: one lane,
    read when a batch is asked for. Another number of workers or ranks makes another sequence of batches.
    """

    def __init__(self, reading: Reading, num_sequences: int, fingerprint: str, workers: int = 1, rank: int = 0, world_size: int = 1):
        count = max(workers, 1)
        self._lanes = [Lane(reading, rank * count + worker, world_size * count) for worker in range(count)]
        self._pools = [ThreadPoolExecutor(1, "data") for _ in range(workers)]
        self._num_sequences, self._rank, self._world_size = num_sequences, rank, world_size
        self._data = {"fingerprint": fingerprint, "share": [rank, world_size, count]}
        self._states = [lane.state() for lane in self._lanes]
        self._taken = 0
        self._ahead: deque[Future[tuple[Batch, list[int]]]] = deque()

    def __next__(self) -> Batch:
        lane = self._taken % len(self._lanes)
        if self._pools:
            if not self._ahead:
                self._work_ahead()
                for future in [*self._ahead][: len(self._lanes)]:
                    future.result()  # a lane that has no documents is found before the first batch is played
            batch, self._states[lane] = self._ahead.popleft().result()
        else:
            batch, self._states[lane] = self._make(self._taken)()
        self._taken += 1
        if self._pools:
            self._work_ahead()
        return batch

    def _work_ahead(self) -> None:
        while len(self._ahead) < _AHEAD * len(self._lanes):
            number = self._taken + len(self._ahead)
            self._ahead.append(self._pools[number % len(self._lanes)].submit(self._make(number)))

    def _make(self, number: int) -> Callable[[], tuple[Batch, list[int]]]:
        """A task that makes this rank's ``number``-th batch; it knows nothing of ``self``, so that a thread keeps nobody alive."""
        lane, sequences = self._lanes[number % len(self._lanes)], self._num_sequences
        first = (number * self._world_size + self._rank) * sequences
        reading = lane.reading

        def make() -> tuple[Batch, list[int]]:
            crops = [next(lane) for _ in range(sequences)]
            return pack_crops(crops, reading.length, reading.seed, first), lane.state()

        return make

    def state_dict(self) -> dict[str, Any]:
        """See :class:`segment_env.batch.Batches`."""
        return {**self._data, "batches": self._taken, "lanes": [list(state) for state in self._states]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`segment_env.batch.Batches`. Raises UserError where files, workers or ranks are others than they were."""
        if state.get("fingerprint") != self._data["fingerprint"]:
            raise UserError(f"the data of {self._lanes[0].reading.name} changed since the checkpoint: its position means nothing in it")
        if state["share"] != self._data["share"]:
            were, are = (f"rank {rank} of {ranks} with {workers}" for rank, ranks, workers in (state["share"], self._data["share"]))
            raise UserError(f"the position in the data is that of {were} workers, not of {are}: use as many ranks and workers as before")
        for future in self._ahead:
            if not future.cancel():
                future.exception()  # until its lane stands still
        self._ahead.clear()
        self._taken, self._states = state["batches"], [list(each) for each in state["lanes"]]
        for lane, position in zip(self._lanes, self._states, strict=True):
            lane.load_state(position)
