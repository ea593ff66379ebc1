"""Waiting for cores, worked by hand and against a process that holds them."""

import math
import os
import subprocess
import sys
import time

import pytest

from qurl.contention import longest_wait, thread_waits


def test_longest_wait_by_hand():
    """Thread 1 waited 2 s, thread 2 half a second, thread 3 began in between; the end of thread 4 changes nothing."""
    before = {"1": 1.0, "2": 7.0, "4": 9.0}
    assert longest_wait(before, {"1": 3.0, "2": 7.5, "3": 1.5}) == 2.0
    assert longest_wait(before, {"1": 1.0, "2": 7.0, "3": 1.5}) == 1.5


def test_no_count_is_no_claim():
    assert thread_waits("no-such-process") == {}
    assert math.isnan(longest_wait({}, {}))


@pytest.fixture
def one_core():
    """This process, and what it starts, on a single core: what runs beside it takes the time from it."""
    if not thread_waits():
        pytest.skip("this system does not count how long threads wait for a core")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def waited_share(seconds: float = 1.0) -> float:
    """Of a loop in this thread."""
    started, before = time.perf_counter(), thread_waits()
    while (passed := time.perf_counter() - started) < seconds:
        pass
    return longest_wait(before, thread_waits()) / passed


def test_a_busy_process_beside_shows(one_core):
    """Compared by ratio, since the machine that runs this test can be busy itself."""
    alone = waited_share()
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(9)]
    try:
        time.sleep(0.3)
        beside = waited_share()
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    # Of a core shared by ten, nine tenths go to others; with three other jobs there already, 3/4 becomes 12/13.
    assert 1 - beside < 0.5 * (1 - alone)
    assert 0.5 < beside <= 1
