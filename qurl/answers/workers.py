"""Worker processes that compare answers under a hard deadline and a memory limit.

A formula can keep SymPy, or Python's own big integers, busy for ever; only ending the process stops that. So
formulas are read in a small pool of processes that are started on first use, kept warm, and replaced after a
deadline. They are plain child processes speaking JSON over pipes: no signals, no multiprocessing start method, no
copy of the parent's memory. Hence they can be used from any thread, in a notebook, and beside torch and vLLM,
which a worker never imports.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

DEADLINE = 2.0  # seconds for one answer
MEMORY_LIMIT = 512 * 2**20  # bytes of address space of a worker
_START_DEADLINE = 120.0  # seconds for the imports of a new worker, on a busy machine
POOL_SIZE = max(1, min(4, os.cpu_count() or 1))


class WorkerFailed(RuntimeError):
    """A worker was stopped. The message says why."""


class _Worker:
    """One process, one request at a time."""

    def __init__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from qurl.answers.workers import serve; serve({os.getpid()})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
        )
        self.ready = False
        self._poll = select.poll()
        self._poll.register(self.process.stdout, select.POLLIN)

    def _line(self, seconds: float) -> bytes:
        """One line from the worker, or WorkerFailed after ``seconds``."""
        end, received = time.monotonic() + seconds, b""
        while not received.endswith(b"\n"):
            if not self._poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise WorkerFailed(f"no verdict within {seconds:g} s")
            piece = os.read(self.process.stdout.fileno(), 65536)
            if not piece:
                raise WorkerFailed("the comparison ran out of memory or crashed")
            received += piece
        return received

    def ask(self, request: list, seconds: float) -> tuple[bool | None, str]:
        try:
            if not self.ready:
                self._line(_START_DEADLINE)
                self.ready = True
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            correct, why = json.loads(self._line(seconds))
        except OSError as error:
            raise WorkerFailed("the comparison ran out of memory or crashed") from error
        if why == "out of memory":
            raise WorkerFailed("the comparison ran out of memory or crashed")
        return correct, why

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Pool:
    """At most ``size`` workers; threads wait for a free one."""

    def __init__(self, size: int = POOL_SIZE):
        self.size = size
        self._free: list[_Worker] = []
        self._slots = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._all: set[_Worker] = set()

    def _take(self) -> _Worker:
        with self._lock:
            if self._free:
                return self._free.pop()
            worker = _Worker()
            self._all.add(worker)
            return worker

    def ask(self, request: list, seconds: float = DEADLINE) -> tuple[bool | None, str]:
        """Send one request; the deadline runs from when a worker takes it.

        Raises:
            WorkerFailed: the deadline passed, or the worker died; it has been stopped.
        """
        with self._slots:
            worker = self._take()
            done = False
            try:
                answer = worker.ask(request, seconds)
                done = True
                return answer
            finally:  # also when the caller is interrupted: a worker in the middle of a request cannot be used again
                if done:
                    with self._lock:
                        self._free.append(worker)
                else:
                    worker.stop()
                    with self._lock:
                        self._all.discard(worker)
                        replacement = _Worker()  # imports while the caller goes on
                        self._all.add(replacement)
                        self._free.insert(0, replacement)

    def close(self):
        """Stop all workers; the next request starts new ones."""
        with self._lock:
            workers, self._all, self._free = self._all, set(), []
        for worker in workers:
            worker.stop()


_pool = Pool()


def pool() -> Pool:
    """The pool of this process."""
    return _pool


def _forget_parents_pool():
    global _pool
    _pool = Pool()  # the pipes belong to the parent


os.register_at_fork(after_in_child=_forget_parents_pool)
atexit.register(lambda: _pool.close())


def serve(parent: int) -> None:
    """The worker's loop: one JSON request a line, one JSON reply a line, until the pipe closes."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(3000)
    import logging
    from fractions import Fraction

    logging.disable(logging.CRITICAL)
    from .equality import judge

    judge(r"\frac{1}{2}x", None, r"\frac{x}{2}", None)  # builds the grammar's tables
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints gets between the replies
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        # A worker whose parent was killed ends itself.
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(
            resource.RLIMIT_CPU,
            (int(used.ru_utime + used.ru_stime + 5 * DEADLINE) + 1, resource.RLIM_INFINITY),
        )
        answer, joined, gold, tolerance = json.loads(line)
        try:
            reply = judge(answer, joined, gold, None if tolerance is None else Fraction(tolerance))
        except MemoryError:
            reply = (False, "out of memory")
        except RecursionError:
            reply = (False, "nested too deeply")
        except Exception as error:  # a fault of a library on odd input is no reason to stop a training run
            reply = (False, f"comparison failed: {type(error).__name__}")
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if reply[1] == "out of memory" or os.getppid() != parent:
            return
