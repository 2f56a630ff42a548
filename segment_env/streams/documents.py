"""Documents that are read while training goes on: local files of any size, and data sets of the Hugging Face hub.

Train, validation and test are files or splits that are named; one that is not is held out of the train documents by a hash of their
bytes, so that two equal documents never part, whatever seed, workers or order. Mistakes are a UserError of one line.

Letters: S sequences, T bytes of a crop.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from segment_env.batch import Batch
from segment_env.errors import UserError
from segment_env.streams.corpora import BETWEEN, SPLITS
from segment_env.streams.shards import Shards, find, open_files, open_hub
from segment_env.streams.streaming import CUTS, Crop, Place, Reading, StreamedBatches, pack_crops
from segment_env.streams.text import crops

HELD_OUT = SPLITS[1:]


class Documents:
    """Documents to train on without end, and two finite sets of them that are held out; a subclass says where they are.

    Args:
        longer_than: bytes; a document of no more than these is left out, of whatever split.
        cut: "joined", one stream with a blank line between documents in full crops, truncated; "documents", each by itself in
            crops, the last one terminated and padded; "beginnings", the first crop of each alone.
        fractions: of train, validation and test among the train documents, as far as validation and test are not named.
        held_out_bytes: how much of validation and of test is read, in whole documents: the first ones there are.
        buffer: crops that are shuffled together.
        workers: threads that read ahead, each its own share; 0: none, batches are read when they are asked for.

    Raises UserError on a cut that is none, on numbers that make no sense, and on fractions that do not sum to 1.
    """

    unit: str = "byte"
    sample_rate: float | None = None
    name: str  #: in messages and results
    shards: dict[str, Shards]  #: of the train split, and of the others that were named

    def __init__(
        self,
        *,
        longer_than: int = 0,
        cut: str = "joined",
        fractions: tuple[float, float, float] = (0.9, 0.05, 0.05),
        held_out_bytes: int = 1 << 20,
        buffer: int = 1024,
        workers: int = 1,
    ):
        if cut not in CUTS:
            raise UserError(f"no cut '{cut}'; use one of {', '.join(CUTS)}")
        for key, value, least in (
            ("longer_than", longer_than, 0),
            ("held_out_bytes", held_out_bytes, 1),
            ("buffer", buffer, 1),
            ("workers", workers, 0),
        ):
            if type(value) is not int or value < least:
                raise UserError(f"data.source.{key} must be a whole number of at least {least}, got {value!r}")
        if len(fractions) != len(SPLITS) or min(fractions) < 0 or not math.isclose(sum(fractions), 1):
            raise UserError(f"fractions of {', '.join(SPLITS)} must be three and sum to 1, got {tuple(fractions)}")
        self.longer_than, self.cut, self.fractions, self.held_out_bytes = longer_than, cut, tuple(fractions), held_out_bytes
        self.buffer, self.workers = buffer, workers

    @property
    def fingerprint(self) -> str:
        """What tells at once whether these are the documents that a checkpoint was made with; cheap, and no proof."""
        return self.name

    @property
    def identity(self) -> dict[str, str]:
        """Where the documents are from, and how they are cut: what a result must carry."""
        return {"data": self.name, "data_cut": f"{self.cut}, documents over {self.longer_than} bytes"}

    def batches(self, num_sequences: int, length: int, seed: int, rank: int = 0, world_size: int = 1) -> StreamedBatches:
        """Batches of S = ``num_sequences`` crops of T = ``length`` bytes of the train split, without end."""
        name = f"'{self.name}'"
        reading = Reading(self.shards["train"], self._is_train, self.cut, length, self.buffer, seed, name)
        return StreamedBatches(reading, num_sequences, self.fingerprint, self.workers, rank, world_size)

    def held_out(self, split: str, length: int, rows: int, max_bytes: int | None = None, seed: int = 0) -> Iterator[Batch]:
        """The crops of "validation" or "test", each once and always the same, ``rows`` to a batch.

        Past ``max_bytes`` there are no more; crops of single documents are whole. ``seed`` is that of the boundary noise.
        """
        documents = self.held_out_documents(split)
        if self.cut == "joined":
            return crops(BETWEEN.join(documents)[:max_bytes], length, rows, seed)
        return self._separate(documents, length, rows, max_bytes or self.held_out_bytes, seed)

    def held_out_documents(self, split: str) -> list[bytes]:
        """The documents of "validation" or "test", whole, whatever the cut. Raises UserError where there are none."""
        documents = self._held_out[split]
        if not documents:
            longer = f" longer than {self.longer_than} bytes" if self.longer_than else ""
            raise UserError(f"'{self.name}' has no {split} document{longer}; name data.source.{split}, or use more or shorter documents")
        return documents

    def _separate(self, documents: list[bytes], length: int, rows: int, max_bytes: int, seed: int) -> Iterator[Batch]:
        kept: list[Crop] = []
        size = first = 0
        for crop in CUTS[self.cut](((Place(0, row, 0), document) for row, document in enumerate(documents)), length):
            if size and size + len(crop.data) > max_bytes:
                break
            kept, size = [*kept, crop], size + len(crop.data)
            if len(kept) == rows:
                yield pack_crops(kept, length, seed, first)
                kept, first = [], first + rows
        if kept:
            yield pack_crops(kept, length, seed, first)

    def beginning(self, split: str, size: int) -> bytes:
        """The first ``size`` bytes of a split, its documents joined by a blank line: what is fitted before training begins."""
        held_out = split in HELD_OUT
        documents = self._held_out[split] if held_out else _first(filter(self._is_train, _all(self.shards["train"])), size)
        return BETWEEN.join(documents)[:size]

    @cached_property
    def _shares(self) -> dict[str, float]:
        """Of the splits that are held out of the train documents."""
        return {split: share for split, share in zip(HELD_OUT, self.fractions[1:], strict=True) if split not in self.shards}

    def _split_of(self, document: bytes) -> str:
        """The split of a document of the train shards, by the hash of its bytes."""
        place = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") / 2**64
        for split, share in self._shares.items():
            if place < share:
                return split
            place -= share
        return "train"

    def _is_long(self, document: bytes) -> bool:
        return len(document) > self.longer_than

    def _is_train(self, document: bytes) -> bool:
        return self._is_long(document) and self._split_of(document) == "train"

    @cached_property
    def _held_out(self) -> dict[str, list[bytes]]:
        """The documents of validation and test, read once: those held out together, those named each by itself."""
        found: dict[str, list[bytes]] = {split: [] for split in HELD_OUT}
        missing = {split: self.held_out_bytes for split, share in self._shares.items() if share}
        for document in filter(self._is_long, _all(self.shards["train"]) if missing else ()):
            if (split := self._split_of(document)) in missing:
                found[split].append(document)
                missing[split] -= len(document)
                missing = {split: size for split, size in missing.items() if size > 0}
                if not missing:
                    break
        for split in self.shards.keys() & found.keys():
            found[split] = _first(filter(self._is_long, _all(self.shards[split])), self.held_out_bytes)
        return found


class LocalDocuments(Documents):
    """Documents of local files: of text, a file a document; of JSON lines or Parquet, a row of one column.

    Args: ``path`` of a file or a folder, as ``validation`` and ``test`` are, where they are not held out; ``format`` "text", "jsonl" or
    "parquet"; ``column`` of a table. Options: see :class:`Documents`. Raises UserError where something cannot be read, or where
    one file is in two splits.
    """

    def __init__(
        self,
        path: str | Path,
        format: str,
        column: str = "text",
        validation: str | Path | None = None,
        test: str | Path | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        named = {"train": path, "validation": validation, "test": test}
        self._paths = {split: find(place, format) for split, place in named.items() if place is not None}
        owners: dict[Path, str] = {}
        for split, paths in self._paths.items():
            for file in paths:
                if (other := owners.setdefault(file.resolve(), split)) != split:
                    raise UserError(f"'{file}' is in both {other} and {split}: they must not overlap")
        self.name = Path(path).expanduser().resolve().name
        self.shards = {split: open_files(paths, format, column) for split, paths in self._paths.items()}

    @cached_property
    def fingerprint(self) -> str:
        """See :class:`Documents`: names and sizes of all files."""
        facts = [(split, path.name, path.stat().st_size) for split, paths in self._paths.items() for path in paths]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @cached_property
    def sha256(self) -> str:
        """Of the splits and the bytes of all files, 64 hexadecimal digits; every file is read for it."""
        total = hashlib.sha256()
        for split, paths in self._paths.items():
            for path in paths:
                with path.open("rb") as file:
                    total.update(split.encode() + hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    @property
    def identity(self) -> dict[str, str]:
        """See :class:`Documents`; the SHA-256 too."""
        return {**super().identity, "data_sha256": self.sha256}


class HubDocuments(Documents):
    """Documents of a data set of the Hugging Face hub, streamed: nothing is downloaded but what is read.

    Args: ``path``, as in "HuggingFaceFW/fineweb"; ``config`` and ``revision`` of it; ``column``; ``train``, ``validation`` and
    ``test``, names of its splits; null holds one out. Options: see :class:`Documents`. Raises UserError where the hub cannot
    be reached, or has no such thing.
    """

    def __init__(
        self,
        path: str,
        config: str | None = None,
        revision: str = "main",
        column: str = "text",
        train: str = "train",
        validation: str | None = None,
        test: str | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        named = {split: name for split, name in zip(SPLITS, (train, validation, test), strict=True) if name is not None}
        if len(set(named.values())) < len(named):
            raise UserError(f"{', '.join(f'{split}={name}' for split, name in named.items())}: splits must not overlap")
        opened, self.commit = open_hub(path, config, revision, list(named.values()), column)
        self.name, self.config, self.shards = path, config, dict(zip(named, opened, strict=True))

    @property
    def fingerprint(self) -> str:
        """See :class:`Documents`: the commit."""
        return f"{self.name} {self.config} {self.commit}"

    @property
    def identity(self) -> dict[str, str]:
        """See :class:`Documents`; the commit and the configuration too."""
        return {**super().identity, "data_revision": self.commit, "data_config": str(self.config)}


def _first(documents: Iterable[bytes], size: int) -> list[bytes]:
    """Whole documents up to the one with which there are ``size`` bytes of them, at least one."""
    found: list[bytes] = []
    for document in documents:
        found.append(document)
        size -= len(document)
        if size <= 0:
            break
    return found


def _all(shards: Shards) -> Iterator[bytes]:
    """Every document once, in the order of the shards."""
    for shard in range(len(shards)):
        yield from shards.read(shard)
