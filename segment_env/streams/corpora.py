"""Corpora: named bytes, split by position into train, validation and test, with the SHA-256 that tells them apart.

Nothing is downloaded: one text is embedded, one is the running Python's own source code, the rest are local files. Bytes are
never decoded or repaired. A mistake of the user's (no such path, nothing in it) is a UserError of one line.

Letters: N bytes.
"""

import hashlib
import lzma
import math
import sysconfig
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path

from torch import Tensor

from segment_env.errors import UserError
from segment_env.streams.text import TextStream, as_tensor

SPLITS = ("train", "validation", "test")

#: what counts as text in a folder; a file that is named itself is taken whatever its suffix
TEXT_SUFFIXES = frozenset(
    ".txt .text .md .rst .tex .bib .html .htm .xml .json .jsonl .csv .tsv .yaml .yml .toml .ini .cfg .org .srt"
    " .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .js .ts .css .sh .sql .rb .pl .lua .r .jl .hs .ml .scala .kt .swift".split()
)
#: between documents; any bytes may stand inside one, so no separator is safe: a blank line is what text itself puts between its parts
BETWEEN = b"\n\n"
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """Named bytes. ``fractions`` are those of train, validation and test, in this order of position.

    Raises UserError if there are no bytes, or unless the fractions are three, not negative, and sum to 1.
    """

    name: str
    data: bytes
    fractions: tuple[float, float, float] = (0.9, 0.05, 0.05)

    def __post_init__(self):
        if not self.data:
            raise UserError(f"corpus '{self.name}' is empty; use a file with at least one byte")
        if len(self.fractions) != len(SPLITS) or min(self.fractions) < 0 or not math.isclose(sum(self.fractions), 1):
            raise UserError(f"fractions of {', '.join(SPLITS)} must be three and sum to 1, got {tuple(self.fractions)}")

    @cached_property
    def sha256(self) -> str:
        """Of all bytes, 64 hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def tensor(self) -> Tensor:
        """All bytes, uint8 [N]."""
        return as_tensor(self.data)

    def split(self, name: str) -> Tensor:
        """The bytes of "train", "validation" or "test" as a view, uint8; the three follow each other without gap or overlap.

        Raises UserError on another name. Where N is small a split may be empty.
        """
        if name not in SPLITS:
            raise UserError(f"no split '{name}'; use one of {', '.join(SPLITS)}")
        i = SPLITS.index(name)
        start, stop = (round(len(self.data) * min(1, sum(self.fractions[:j]))) for j in (i, i + 1))
        return self.tensor[start:stop]

    def stream(self, split: str) -> TextStream:
        """Random crops of one split."""
        return TextStream(self.split(split), f"corpus '{self.name}' {split} split")


@lru_cache(maxsize=1)
def moby_dick() -> Corpus:
    """Herman Melville's novel, 1,218,684 bytes of UTF-8, embedded in the package: what everything runs on by default."""
    packed = resources.files("segment_env").joinpath("data/moby_dick.txt.xz").read_bytes()
    return Corpus("moby_dick", lzma.decompress(packed))


def files(path: str | Path) -> Corpus:
    """One local file as it is, or the text files of a folder, sorted by path and joined by a blank line.

    In a folder (recursively) text is what has one of TEXT_SUFFIXES, in small or capital letters. Empty files are left out, and
    so are hidden files and folders below ``path`` (a name with a leading dot). Raises UserError where nothing is left.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"no file or folder '{path}'; give the path of a text file or of a folder of them")
    name = path.resolve().name
    if not path.is_dir():
        return Corpus(name, read_file(path))
    data = BETWEEN.join(filter(None, map(read_file, text_files(path))))
    if not data:
        raise UserError(f"folder '{path}' holds no text; use files with one of the suffixes .txt .md .py .json .csv ..., not empty")
    return Corpus(name, data)


@lru_cache(maxsize=1)
def standard_library() -> Corpus:
    """The running Python's own .py sources, tests included: some 30 MB of program text without a download.

    Installed packages are left out. Files stand in the order of a hash of their relative path, so that the splits are of one
    kind, though they are split by position. The bytes differ between versions of Python: the SHA-256 tells.
    Raises UserError where Python was installed without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    relative = [path.relative_to(root) for path in root.rglob("*.py") if path.is_file()]
    kept = sorted((path for path in relative if not _NOT_STANDARD & set(path.parts)), key=_path_hash)
    data = BETWEEN.join(filter(None, (read_file(root / path) for path in kept)))
    if not data:
        raise UserError("this Python has no sources of its standard library; use data files, or a Python with its .py files")
    return Corpus("standard_library", data)


def _path_hash(path: Path) -> bytes:
    return hashlib.sha256(path.as_posix().encode("utf-8", "surrogateescape")).digest()


def text_files(folder: Path) -> list[Path]:
    """Files with a suffix of text below ``folder``, none hidden, sorted by path relative to it."""
    relative = (path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in TEXT_SUFFIXES and path.is_file())
    shown = (path for path in relative if not any(part.startswith(".") for part in path.parts))
    return [folder / path for path in sorted(shown, key=Path.as_posix)]


def read_file(path: Path) -> bytes:
    """All bytes of a file as they are. Raises UserError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read '{path}' ({error.strerror}); make it readable or leave it out") from error
