"""What is trained on and what is held out, for corpora (split by position), documents (by name or hash) and generators (by seed).

Letters: S sequences, B rows, T bytes.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from segment_env.batch import Batch, Batches, ByteStream, EpisodeBatches, Episodes
from segment_env.errors import UserError
from segment_env.scorer import Scorer
from segment_env.streams import SPLITS, Corpus, Documents, TextStream, crops, whitespace_starts

Source = Corpus | Documents | ByteStream  #: what a ``data.source`` of a configuration builds
_TEXT = (Corpus, Documents)

MAX_SEED = (1 << 61) - 1  #: of a run and of its noise
_GENERATED = {"validation": MAX_SEED + 1, "test": MAX_SEED + 2}  # seeds that no training run can have
_GENERATED_BYTES = 1 << 17
_FITTED_BYTES, _CHUNK = 1 << 20, 1 << 16


def batches(source: Source, num_sequences: int, length: int, seed: int, rank: int = 0, world_size: int = 1) -> Batches:
    """The batches to train on: S = ``num_sequences`` sequences of T = ``length`` bytes a rank, other ones on every rank."""
    if isinstance(source, Documents):
        return source.batches(num_sequences, length, seed, rank, world_size)
    first, total = rank * num_sequences, world_size * num_sequences
    return EpisodeBatches(Episodes(train_stream(source), num_sequences, length, seed, first, total))


def is_text(source: Source) -> bool:
    """Whether boundaries are compared with whitespace, as those of a corpus and of documents are."""
    return isinstance(source, _TEXT)


def train_stream(source: Source) -> ByteStream:
    """Training bytes by index: random crops of a corpus' train split, or of the first 2^20 bytes of documents; or the generator itself."""
    return _stream(source, "train")


def _stream(source: Source, split: str) -> ByteStream:
    if isinstance(source, Documents):
        return TextStream(source.beginning(split, _FITTED_BYTES), f"the beginning of the {split} split of '{source.name}'")
    return source.stream(split) if isinstance(source, Corpus) else source


def training_bytes(source: Source, length: int, seed: int) -> Iterator[bytes]:
    """Bytes to fit a tokenizer to, in chunks: all of a corpus' train split, or the first 2^20 bytes of that of documents.

    Of a generator 2^20 bytes that a run of ``seed`` trains on.
    """
    if isinstance(source, Documents):
        return iter([source.beginning("train", _FITTED_BYTES)])
    if isinstance(source, Corpus):
        return (chunk.numpy().tobytes() for chunk in source.split("train").split(_CHUNK))
    rows = max(_CHUNK // length, 1)
    batches = (Episodes(source, rows, length, seed).batch(n) for n in range(max(_FITTED_BYTES // (rows * length), 1)))
    return (bytes(x[valid].tolist()) for batch in batches for x, valid in zip(batch.bytes, batch.valid, strict=True))


def held_out_stream(source: Source, split: str) -> ByteStream:
    """Random crops of a held-out split; of a generator, the generator: choose a seed that no run has, above MAX_SEED."""
    return _stream(source, split)


def held_out(source: Source, split: str, length: int, rows: int, max_bytes: int | None = None, seed: int = 0) -> Iterator[Batch]:
    """Batches of the validation or test split: crops of ``length`` bytes, ``rows`` to a batch, always the same.

    Of a corpus every byte comes once, the first ``max_bytes`` where that is given, and so do those of the documents that are held
    out; of a generator as many whole batches as 2^17 bytes or ``max_bytes`` hold, at least one.
    ``seed`` is that of the boundary noise alone: it changes no byte.
    """
    if split not in SPLITS[1:]:
        raise ValueError(f"held out are {' and '.join(SPLITS[1:])}, not {split!r}")
    if isinstance(source, Corpus):
        return crops(source.split(split)[:max_bytes], length, rows, seed)
    if isinstance(source, Documents):
        return source.held_out(split, length, rows, max_bytes, seed)
    episodes = Episodes(source, rows, length, _GENERATED[split])
    count = max((max_bytes or _GENERATED_BYTES) // (rows * length), 1)
    return (replace(episodes.batch(n), seed=seed) for n in range(count))


def identity(source: Source) -> dict[str, str]:
    """What a result must carry: name and SHA-256 of a corpus or of local documents, the commit of others, or the kind of generator."""
    if isinstance(source, Documents):
        return source.identity
    if isinstance(source, Corpus):
        return {"data": source.name, "data_sha256": source.sha256}
    return {"data": type(source).__name__}


def reference_starts(source: Source, x: Tensor) -> Tensor | None:
    """What boundaries of bytes ``x`` [S, T] are compared with, [S, T] bool: whitespace starts of text, a generator's own truth.

    None: the generator has none.
    """
    return whitespace_starts(x) if isinstance(source, _TEXT) else source.reference(x)


def known_scorer(source: Source) -> Scorer:
    """The scorer that a source is itself, as diagnostic problems are. Raises UserError on any other source."""
    if not isinstance(source, Scorer):
        raise UserError(
            f"model=closed_form scores the problems of diagnostic=NAME alone, not {type(source).__name__}: choose another model"
        )
    return source
