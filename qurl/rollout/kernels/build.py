"""Compile the CPU kernels for this machine's processor on first use, and keep the library.

It lies under ``<cache>/kernels`` with two digests in its name: of what decides its content (source, compiler,
flags, processor), and of the content. A file that was cut off, damaged or put there by something else does not match
its own name and is compiled again: to load it could kill the process (SIGBUS).
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from qurl.models import cache_folder

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang", "g++")
# A file that is not yet in place for longer than this was left behind by a process that was killed.
_STALE_SECONDS = 600


class KernelUnavailableError(RuntimeError):
    """The compiled kernels cannot be had here; the message says why."""


def load_library(
    sources: Sequence[Path], headers: Sequence[Path] = (), *, machine: Iterable[str]
) -> ctypes.CDLL:
    """The shared library of ``sources``: from the cache if it is there and intact, else compiled.

    Parameters
    ----------
    sources, headers : sequence of Path
        C files; the first source names the library.
    machine : iterable of str
        Instruction sets of the processor, for which ``-march=native`` compiles.

    Raises
    ------
    KernelUnavailableError
        If there is no compiler, or the sources do not compile or load.

    Notes
    -----
    Where the cache cannot be written (read-only, full, not a folder) the library serves this process alone, which a
    warning says.
    """
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [file.read_text() for file in (*sources, *headers)]
    stem = f"{sources[0].stem}-{_digest(chr(10).join([*texts, *FLAGS, version, *sorted(machine)]).encode())}"
    folder = cache_folder() / "kernels"
    with contextlib.suppress(OSError):
        if (kept := _intact(folder, stem)) is not None:
            return ctypes.CDLL(str(kept))
    try:
        with tempfile.TemporaryDirectory(prefix="qurl-") as scratch:
            path = _compile(compiler, sources, Path(scratch))
            try:
                path = _keep(path.read_bytes(), folder, stem)
            except OSError as error:
                reason = error.strerror or error
                logger.warning(
                    "%s cannot be written (%s): the CPU kernels serve this process alone.", folder, reason
                )
            return ctypes.CDLL(str(path))  # stays loaded when its file is gone
    except OSError as error:
        raise KernelUnavailableError(f"the compiled kernels cannot be loaded: {error}") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CC"), *COMPILERS)):
        if path := shutil.which(name):
            return path
    raise KernelUnavailableError(f"no C compiler was found (looked for {', '.join(COMPILERS)}): install gcc")


def _compile(compiler: str, sources: Sequence[Path], folder: Path) -> Path:
    path = folder / "kernels.so"
    run = subprocess.run(
        [compiler, *FLAGS, *map(str, sources), "-o", str(path), "-lm"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(folder)},  # the compiler's own temporary files go with the folder
    )
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["no message"])[0]
        raise KernelUnavailableError(f"{compiler} could not compile the CPU kernels: {reason}")
    return path


def _intact(folder: Path, stem: str) -> Path | None:
    """The library that matches its name; others of that name are removed."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        if path.stem.rpartition("-")[2] == _digest(path.read_bytes()):
            return path
        path.unlink(missing_ok=True)
    return None


def _keep(content: bytes, folder: Path, stem: str) -> Path:
    """Put the library in its place, whole or not at all: other processes may do the same at this moment."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()
    path = folder / f"{stem}-{_digest(content)}.so"
    descriptor, partial = tempfile.mkstemp(suffix=".partial", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return path
