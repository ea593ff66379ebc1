"""Where vLLM's and torch's output goes: into a log file instead of the notebook.

vLLM logs through Python, and its extensions and oneDNN write to the process's file descriptors directly, so both have
to be turned aside. Only what is written during a call into the engine is: between the calls everything is as before.
"""

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import qurl
from qurl.models import cache_folder

logger = logging.getLogger(__name__)


def new_log_path() -> Path:
    """A file under ``<cache>/logs``, named by time and process; in a temporary folder where that is not possible."""
    name = f"rollout-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    path = cache_folder() / "logs" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as log:
            log.write(f"qurl {qurl.__version__}\n")  # finds a full disk, too
    except OSError as error:
        path = Path(tempfile.mkdtemp(prefix="qurl-")) / name
        logger.warning(
            "%s cannot be written (%s): this engine's log is %s.", cache_folder(), error.strerror, path
        )
    return path


def last_lines(path: Path, count: int = 12) -> str:
    """The end of a log, for an error message; empty if it cannot be read."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
    except OSError:
        return ""


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Append all that this process prints or logs through vLLM to ``path``, until the context ends.

    Python's streams, the file descriptors 1 and 2 (for compiled code), and the handlers of vLLM's loggers, which hold
    the stream that was current when vLLM was imported.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            AttributeError, ValueError, OSError
        ):  # None, closed or broken: nothing to lose
            stream.flush()
    with open(path, "a", buffering=1, errors="replace") as log, contextlib.ExitStack() as undo:
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):  # a process without standard streams has nothing to turn aside
                saved = os.dup(descriptor)
                undo.callback(os.close, saved)
                undo.callback(os.dup2, saved, descriptor)
                os.dup2(log.fileno(), descriptor)
        undo.enter_context(contextlib.redirect_stdout(log))
        undo.enter_context(contextlib.redirect_stderr(log))
        known_handlers = list(logging.getLogger("vllm").handlers)
        for handler in known_handlers:
            if isinstance(handler, logging.StreamHandler):
                undo.callback(setattr, handler, "stream", handler.stream)
                handler.stream = log  # `setStream` would flush a stream that may be closed by now
        try:
            yield
        finally:
            # vLLM imported in here has made its handler on the log, which is about to be closed.
            for handler in list(logging.getLogger("vllm").handlers):
                if handler in known_handlers or not isinstance(handler, logging.StreamHandler):
                    continue
                if sys.__stderr__ is None or sys.__stderr__.closed:
                    logging.getLogger("vllm").removeHandler(handler)
                else:
                    handler.stream = sys.__stderr__
