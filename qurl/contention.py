"""Whether other jobs held the cores while something was timed, seen from this process alone.

Linux counts, per thread, the time for which it was ready to run but had no core. Unlike the load of the machine
this needs no view of other processes, so that it holds in a container and under a CPU quota too. It does not see
what a hypervisor takes from a whole virtual machine.
"""

from pathlib import Path

__all__ = ["DISTURBED", "longest_wait", "thread_waits"]

# A measurement is disturbed from this share of waiting on. On two idle cores rollouts waited for 0.01 to 0.02 of
# their time, beside one busy process for 0.4.
DISTURBED = 0.05


def thread_waits(process: int | str = "self") -> dict[str, float]:
    """How long each thread of a process has waited for a core since it started.

    Parameters
    ----------
    process : int or "self"
        Number of the process; this one by default.

    Returns
    -------
    dict of str to float
        Seconds by thread number; empty where the system does not count them (macOS, gVisor).
    """
    waits = {}
    for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
        try:
            _, waited, turns = map(int, file.read_text().split())
        except OSError:  # the thread ended meanwhile
            continue
        # A kernel that does not count prints zeros; a thread that ever ran had a turn.
        if turns:
            waits[file.parent.name] = waited / 1e9
    return waits


def longest_wait(before: dict[str, float], after: dict[str, float]) -> float:
    """How long the thread that waited longest had no core.

    The longest wait and not the sum: products wait for the slowest of their threads, while several threads that
    wait for the same core would count its loss several times.

    Parameters
    ----------
    before, after : dict of str to float
        From ``thread_waits``.

    Returns
    -------
    float
        Seconds between the two; NaN where the system does not count them.
    """
    return max((waited - before.get(thread, 0) for thread, waited in after.items()), default=float("nan"))
