"""Worker processes that compare answers under a hard deadline and a memory limit.

A formula can keep SymPy, or Python's own big integers, busy for ever; only ending the process stops that. So
formulas are read in a small pool of processes that are started on first use, kept warm, and replaced after a
deadline. They are plain child processes speaking JSON over pipes: no signals, no multiprocessing start method, no
copy of the parent's memory. Hence they can be used from any thread, in a notebook, and beside torch and vLLM,
which a worker never imports.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

DEADLINE = (
    1.9  # seconds for one comparison; with finding the answer and stopping a worker, 2 s for one answer
)
MEMORY_LIMIT = 512 * 2**20  # bytes of address space of a worker
POOL_SIZE = max(2, min(4, os.cpu_count() or 1))  # two at least, so that one is warm while another is replaced
_START_DEADLINE = 120.0  # seconds for the imports of a new worker, on a busy machine
_LONGEST_SERVICE = 20_000  # requests after which a worker is replaced: the grammar's tables only ever grow
_PROGRAM = "from qurl.answers.workers import serve; serve({parent})"
_OUT_OF_MEMORY = "the comparison ran out of memory or crashed"


class WorkerFailed(RuntimeError):
    """A worker was stopped. The message says why."""


class _Worker:
    """One process, one request at a time."""

    def __init__(self):
        self.served = 0
        self._spawn()

    def _spawn(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(parent=os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
        )
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
                raise WorkerFailed(_OUT_OF_MEMORY)
            received += piece
        return received

    def ask(self, request: list, seconds: float) -> list:
        line = json.dumps(request).encode() + b"\n"
        if not self._hand_over(line):
            # Killed from outside while it was idle, which is no answer's fault.
            self.stop()
            self._spawn()
            self.served = 0
            if not self._hand_over(line):
                raise RuntimeError(
                    "The processes that compare answers are killed from outside as soon as they have started: look "
                    "for a memory limit or a supervisor of this machine that ends them."
                )
        self.served += 1
        try:
            reply = json.loads(self._line(seconds))
        except OSError as error:
            raise WorkerFailed(_OUT_OF_MEMORY) from error
        if reply is None:
            raise WorkerFailed(_OUT_OF_MEMORY)
        return reply

    def _hand_over(self, line: bytes) -> bool:
        """Send a request; False where the process was dead before."""
        if not self.served:
            self._start()
        if self.process.poll() is not None:
            return False
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _start(self):
        """Wait for the imports. A worker that cannot start is a broken installation, not a wrong answer."""
        try:
            problem = json.loads(self._line(_START_DEADLINE))
        except WorkerFailed:
            # Killed from outside while it started, perhaps: a broken installation fails again.
            self.stop()
            self._spawn()
            try:
                problem = json.loads(self._line(_START_DEADLINE))
            except WorkerFailed as error:
                problem = str(error)
        if problem:
            raise RuntimeError(
                f"The process that compares answers did not start ({problem}): install the pinned math-verify again "
                "(`make env`, or pip install 'math-verify[antlr4_9_3]==0.9.0')."
            )

    def stop(self):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):  # what was not sent to a dead worker cannot be flushed
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
            while len(self._all) < self.size:  # all at once: they import side by side
                self._free.insert(0, self._add())
            return self._free.pop()

    def _add(self) -> _Worker:
        worker = _Worker()
        self._all.add(worker)
        return worker

    def ask(self, request: list, seconds: float = DEADLINE) -> list:
        """Send one request; the deadline runs from when a worker takes it.

        Raises
        ------
        WorkerFailed
            The deadline passed, or the worker died; it has been stopped.
        RuntimeError
            Workers cannot be started.
        """
        with self._slots:
            worker = self._take()
            usable = False
            try:
                reply = worker.ask(request, seconds)
                usable = worker.served < _LONGEST_SERVICE
                return reply
            finally:  # also on an interrupt: a worker in the middle of a request cannot be used again
                if not usable:
                    worker.stop()
                with self._lock:
                    if worker in self._all:  # not closed meanwhile
                        if usable:
                            self._free.append(worker)
                        else:
                            self._all.discard(worker)
                            if worker.served:  # the replacement imports while the caller goes on
                                self._free.insert(0, self._add())

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

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints gets between the replies

    def reply(message) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(3000)
    logging.disable(logging.CRITICAL)
    try:
        from .equality import judge

        # Builds the grammar's tables, and shows that it works: a broken one would make every answer wrong.
        for answer, gold in (
            (r"\frac{1}{2}x", r"\frac{x}{2}"),
            (r"18\text{ cm}", "18"),
            (r"\{2, 2^0\}", "1, 2"),
        ):
            correct, why = judge(answer, None, gold)
            if not correct:
                return reply(f"{answer} does not equal {gold}: {why}")
    except Exception as error:
        return reply(f"{type(error).__name__}: {error}")
    reply("")
    for line in sys.stdin:
        # A worker whose parent was killed ends itself.
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + 5 * DEADLINE) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        answer, joined, golds, tolerance = json.loads(line)
        verdicts = []
        for gold in golds:
            try:
                verdicts.append(
                    judge(answer, joined, gold, None if tolerance is None else Fraction(tolerance))
                )
            except MemoryError:
                return reply(None)
            except RecursionError:
                verdicts.append((False, "nested too deeply"))
            except Exception as error:  # a library's fault on odd input is no reason to stop a training run
                verdicts.append((False, f"comparison failed: {type(error).__name__}"))
            if verdicts[-1][0]:
                break
        reply(verdicts)
        if os.getppid() != parent:
            return None
