"""What is trained on and what is held out, for corpora (split by position) and for generators (split by seed).

Letters: B rows, T bytes.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from segment_env.batch import Batch, ByteStream, Episodes
from segment_env.errors import UserError
from segment_env.scorer import Scorer
from segment_env.streams import SPLITS, Corpus, crops, whitespace_starts

Source = Corpus | ByteStream  #: what a ``data.source`` of a configuration builds

MAX_SEED = (1 << 61) - 1  #: of a run and of its noise
_GENERATED = {"validation": MAX_SEED + 1, "test": MAX_SEED + 2}  # seeds that no training run can have
_GENERATED_BYTES = 1 << 17
_FITTED_BYTES, _CHUNK = 1 << 20, 1 << 16


def train_stream(source: Source) -> ByteStream:
    """The stream to train on: random crops of a corpus' train split, or the generator itself."""
    return source.stream("train") if isinstance(source, Corpus) else source


def training_bytes(source: Source, length: int, seed: int) -> Iterator[bytes]:
    """Bytes to fit a tokenizer to, in chunks: all of a corpus' train split; of a generator 2^20 bytes that a run of ``seed`` trains on."""
    if isinstance(source, Corpus):
        return (chunk.numpy().tobytes() for chunk in source.split("train").split(_CHUNK))
    rows = max(_CHUNK // length, 1)
    batches = (Episodes(source, rows, length, seed).batch(n) for n in range(max(_FITTED_BYTES // (rows * length), 1)))
    return (bytes(x[valid].tolist()) for batch in batches for x, valid in zip(batch.bytes, batch.valid, strict=True))


def held_out_stream(source: Source, split: str) -> ByteStream:
    """Random crops of a held-out split; of a generator, the generator: choose a seed that no run has, above MAX_SEED."""
    return source.stream(split) if isinstance(source, Corpus) else source


def held_out(source: Source, split: str, length: int, rows: int, max_bytes: int | None = None, seed: int = 0) -> Iterator[Batch]:
    """Batches of the validation or test split: crops of ``length`` bytes, ``rows`` to a batch, always the same.

    Of a corpus every byte comes once, the first ``max_bytes`` where that is given; of a generator as many whole batches as
    2^17 bytes or ``max_bytes`` hold, at least one.
    ``seed`` is that of the boundary noise alone: it changes no byte.
    """
    if split not in SPLITS[1:]:
        raise ValueError(f"held out are {' and '.join(SPLITS[1:])}, not {split!r}")
    if isinstance(source, Corpus):
        return crops(source.split(split)[:max_bytes], length, rows, seed)
    episodes = Episodes(source, rows, length, _GENERATED[split])
    count = max((max_bytes or _GENERATED_BYTES) // (rows * length), 1)
    return (replace(episodes.batch(n), seed=seed) for n in range(count))


def identity(source: Source) -> dict[str, str]:
    """Name and SHA-256 of a corpus, or the kind of generator: what a result must carry."""
    if isinstance(source, Corpus):
        return {"data": source.name, "data_sha256": source.sha256}
    return {"data": type(source).__name__}


def reference_starts(source: Source, x: Tensor) -> Tensor | None:
    """What boundaries of bytes ``x`` [S, T] are compared with, [S, T] bool: whitespace starts of a corpus, a generator's own truth.

    None: the generator has none.
    """
    return whitespace_starts(x) if isinstance(source, Corpus) else source.reference(x)


def known_scorer(source: Source) -> Scorer:
    """The scorer that a source is itself, as diagnostic problems are. Raises UserError on any other source."""
    if not isinstance(source, Scorer):
        raise UserError(
            f"model=closed_form scores the problems of diagnostic=NAME alone, not {type(source).__name__}: choose another model"
        )
    return source
