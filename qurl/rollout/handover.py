"""The folder through which a trainer hands weights to a server on the same machine.

The server makes it, in shared memory where there is room, for this user alone, and holds a lock in it for as long as it
lives; the trainer holds another, since a server follows one policy.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file

logger = logging.getLogger(__name__)

_PREFIX = "qurl-serve-"
_SHARED_MEMORY = Path("/dev/shm")
_SERVER_LOCK, _TRAINER_LOCK = ".server", ".trainer"
_WEIGHTS = re.compile(r"[0-9a-f]{32}\.safetensors")


@contextlib.contextmanager
def handover_folder(size: int) -> Iterator[Path]:
    """A new folder for a server, in memory if two updates of ``size`` bytes fit there; removed at the end.

    Those that killed servers have left are removed first: they would fill the memory.
    """
    _remove_those_of_the_dead()
    place = None
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        place = _SHARED_MEMORY if shutil.disk_usage(_SHARED_MEMORY).free > 2 * size else None
    if place is None:
        logger.warning(
            "No room in shared memory for an update of %.1f GB: updates go through files.", size / 1e9
        )
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place) as name, FileLock(Path(name, _SERVER_LOCK)):
        yield Path(name)


def _remove_those_of_the_dead() -> None:
    for folder in _SHARED_MEMORY.glob(f"{_PREFIX}*"):
        # A lock tells the dead from those that live in another container with the same memory; process numbers do not.
        with (
            contextlib.suppress(OSError, ValueError, Timeout),
            FileLock(own_folder(folder) / _SERVER_LOCK, timeout=0),
        ):
            shutil.rmtree(folder, ignore_errors=True)


def own_folder(folder: str | os.PathLike) -> Path:
    """``folder``, if it is one that a server of this user made here: files are written there, and removed.

    Raises
    ------
    ValueError
        If it is anything else.
    """
    path = Path(folder)
    try:
        found = path.lstat()
    except (OSError, ValueError):
        found = None
    if (
        found is None
        or not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or found.st_mode & 0o077
        or not path.name.startswith(_PREFIX)
        or path.parent not in (_SHARED_MEMORY, Path(tempfile.gettempdir()))
    ):
        raise ValueError(
            f"{str(path)!r} is no folder that qurl serve has made on this machine for this user."
        )
    return path


def trainer_lock(folder: Path) -> FileLock:
    """Held by the trainer whose policy a server follows."""
    return FileLock(folder / _TRAINER_LOCK, timeout=0)


@contextlib.contextmanager
def weights_file(
    folder: Path, named_tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 of a safetensors file of these tensors, for as long as the context lasts."""
    for left in folder.iterdir():  # of a trainer that was killed
        if _WEIGHTS.fullmatch(left.name):
            left.unlink(missing_ok=True)
    file = folder / f"{uuid.uuid4().hex}.safetensors"
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in named_tensors}, file)
        with open(file, "rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        yield file.name, sha256
    finally:
        file.unlink(missing_ok=True)
