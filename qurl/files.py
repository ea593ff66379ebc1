"""Files that are complete or not there, whatever happens while they are written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A place beside ``file`` to write to, which becomes ``file`` at the end, or is removed after an exception."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")  # several processes may share the folder
    try:
        yield partial
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(file) as partial:
        partial.write_text(text)
