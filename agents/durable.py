"""Files that are whole or not there, whenever the process or the machine stops."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Bring a file to the disk; of a folder, the names in it. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, content: str | bytes, tag: str = "") -> None:
    """Write a file beside, bring it to the disk and rename it into its place. Raises OSError, and then leaves the old file as it was.

    Processes that may write the same file at once give each a ``tag`` of its own, for the name of the file beside.
    """
    beside = path.with_name(f"{path.name}{tag}.partial")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(beside)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)
