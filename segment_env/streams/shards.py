"""Shards: files of documents that are read where they lie, on this machine or on the Hugging Face hub.

A document is bytes. A text file is one document as it is; of a table the bytes of one column are: those of a binary column, or the
UTF-8 of a string column, invalid bytes included. Nothing is decoded, repaired or dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from segment_env.errors import UserError, one_line
from segment_env.streams.corpora import read_file, text_files

_ROWS = 64  #: of a table that are held at once
_SUFFIXES = {"jsonl": (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz"), "parquet": (".parquet",)}
FORMATS = ("text", *_SUFFIXES)


class Shards(Protocol):
    """Documents in numbered shards."""

    def __len__(self) -> int:
        """How many shards there are, at least one."""
        ...

    def read(self, shard: int, row: int = 0) -> Iterator[bytes]:
        """The documents of one shard in their order, from the ``row``-th on. Raises UserError where they cannot be read."""
        ...


class TextFiles:
    """Files as they are, each a shard of one document."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, shard: int, row: int = 0) -> Iterator[bytes]:
        """See :class:`Shards`."""
        if row == 0:
            yield read_file(self.paths[shard])


class Column:
    """One column of a table that ``datasets`` streams, a row a document; a row without a value is an empty one.

    Args: ``table``, a ``datasets.IterableDataset``; ``shard_name`` tells a shard's number in error messages.
    """

    def __init__(self, table: Any, column: str, shard_name: Callable[[int], str]):
        self.table, self.column, self._shard_name = table, column, shard_name

    def __len__(self) -> int:
        return self.table.num_shards

    def read(self, shard: int, row: int = 0) -> Iterator[bytes]:
        """See :class:`Shards`. What comes before ``row`` is read and passed over."""
        seen = 0
        try:
            for rows in self.table.shard(len(self), shard).with_format("arrow").iter(_ROWS):
                if seen + len(rows) > row:
                    documents = self._bytes(rows, shard).slice(max(row - seen, 0))
                    yield from (document.as_py() or b"" for document in documents)
                seen += len(rows)
        except UserError:
            raise
        except Exception as error:  # whatever a format, a file system or a network raises
            raise UserError(f"cannot read {self._shard_name(shard)} ({one_line(error)}); repair it or leave it out") from error

    def _bytes(self, rows: Any, shard: int) -> Any:
        """The column as an Arrow array of binaries, a view. Raises UserError where it is missing or holds something else."""
        import pyarrow as pa  # slow to import, and wanted by few

        check_column(self.column, rows.column_names, self._shard_name(shard))
        binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
        column = rows.column(self.column)
        kind = binary.get(column.type, column.type)
        if kind not in binary.values():
            raise UserError(f"column '{self.column}' of {self._shard_name(shard)} holds {column.type}; use a column of strings or bytes")
        return column.cast(kind)


def check_column(column: str, there: Sequence[str], where: str) -> None:
    """Raises UserError, naming the columns that are ``there``, unless ``column`` is one of them."""
    if column not in there:
        raise UserError(f"{where} has no column '{column}'; use data.source.column with one of {', '.join(there)}")


def find(path: str | Path, kind: str) -> list[Path]:
    """One local file, or those of a folder, recursively, that have a suffix of their ``kind``, sorted; hidden ones are left out.

    Raises UserError where there are none, where one holds nothing (text is then left out of a folder), or on another kind.
    """
    if kind not in FORMATS:
        raise UserError(f"no format '{kind}'; use one of {', '.join(FORMATS)}")
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"no file or folder '{path}'; give the path of a {kind} file or of a folder of them")
    found = [path]
    if path.is_dir() and kind == "text":
        found = [file for file in text_files(path) if file.stat().st_size]
    elif path.is_dir():
        below = (file.relative_to(path) for file in path.rglob("*") if file.name.lower().endswith(_SUFFIXES[kind]) and file.is_file())
        found = [path / file for file in sorted(below, key=Path.as_posix) if not any(part.startswith(".") for part in file.parts)]
    if not found:
        suffixes = ", ".join(_SUFFIXES.get(kind, (".txt", ".md", ".py", "...")))
        raise UserError(f"folder '{path}' holds no {kind} files; use files with one of the suffixes {suffixes}")
    if empty := [file for file in found if not file.stat().st_size]:
        raise UserError(f"'{empty[0]}' is empty; fill it or leave it out")
    return found


def open_files(paths: Sequence[Path], kind: str, column: str) -> Shards:
    """Files of one kind as shards. Raises UserError on the first that is none of its kind or lacks the column."""
    if kind == "text":
        return TextFiles(paths)
    options: dict[str, Any] = {"on_mixed_types": None}  # by default the loader rewrites a column that also holds numbers as JSON
    if kind == "parquet":
        _check_parquet(paths, column)
        options = {"batch_size": _ROWS}  # not a whole row group
    builder = _builder("json" if kind == "jsonl" else kind, f"'{paths[0]}'", data_files={"train": [str(path) for path in paths]}, **options)
    return Column(_split(builder, "train", f"'{paths[0]}'"), column, lambda shard: f"'{paths[shard]}'")


def open_hub(name: str, config: str | None, revision: str, splits: Sequence[str], column: str) -> tuple[list[Shards], str]:
    """Splits of a data set of the hub as shards, and the commit that ``revision`` stands for.

    Raises UserError where the hub cannot be reached, or has no such data set, configuration, split or column.
    """
    builder = _builder(name, f"the data set '{name}'", name=config, revision=revision)
    opened: list[Shards] = []
    for split in splits:
        table = _split(builder, split, f"the data set '{name}'")
        if table.column_names:
            check_column(column, table.column_names, f"the data set '{name}'")
        opened.append(Column(table, column, lambda shard, split=split: f"shard {shard} of the {split} split of '{name}'"))  # type: ignore[misc]
    return opened, str(builder.hash)


def _check_parquet(paths: Sequence[Path], column: str) -> None:
    """Read every footer: a shard that is damaged should not be found after a day of training."""
    import pyarrow as pa
    import pyarrow.parquet

    for path in paths:
        try:
            names = pyarrow.parquet.read_schema(path).names
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"'{path}' is no Parquet file ({one_line(error)})") from error
        check_column(column, names, f"'{path}'")


def _builder(path: str, what: str, **options: Any) -> Any:
    import datasets  # takes seconds

    hush()
    try:
        return datasets.load_dataset_builder(path, **options)
    except Exception as error:  # of the network, of many libraries
        raise UserError(f"cannot open {what}: {one_line(error)}") from error


def hush() -> None:
    """What goes wrong with data of the hub becomes one line of ours: theirs, one for every try, would stand before it."""
    import datasets
    import huggingface_hub

    for library in (datasets, huggingface_hub):
        library.utils.logging.set_verbosity(library.utils.logging.CRITICAL)


def _split(builder: Any, split: str, what: str) -> Any:
    try:
        return builder.as_streaming_dataset(split=split)
    except Exception as error:
        raise UserError(f"cannot open the split '{split}' of {what}: {one_line(error)}") from error
