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


def write(path: Path, text: str) -> None:
    """Write a file beside, bring it to the disk and rename it into its place. Raises OSError, and then leaves the old file as it was."""
    beside = path.with_name(f"{path.name}.partial")
    try:
        beside.write_text(text)
        sync(beside)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)
