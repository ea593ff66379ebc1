"""What several training processes agree on: who looks at files, and who says what went wrong.

Collectives are accelerate's; processes are started by its launcher or torch's.
"""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.distributed import TCPStore

Value = TypeVar("Value")


def on_main(function: Callable[[], Value]) -> Value:
    """Call ``function`` in the main process alone; a collective operation.

    Parameters
    ----------
    function : callable
        Without arguments.

    Returns
    -------
    object
        What it returned there, in every process.

    Raises
    ------
    Exception
        What it raised there, in every process.
    """
    state = PartialState()
    if state.num_processes == 1:
        return function()
    outcome: list = [None, None]
    if state.is_main_process:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    value, error = broadcast_object_list(outcome)
    if error is not None:
        raise error
    return value


def is_first_to_fail() -> bool:
    """Whether this process is the first of those that were started together to ask; the others only follow it.

    The launcher's own store counts, because a process that fails early has no process group yet, and one that fails
    late cannot count on the others to come to a collective. Without torch's launcher each process is the first.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=datetime.timedelta(seconds=20),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store.add(f"qurl/failed/{attempt}", 1) == 1


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """Let the exception of the process that fails first through, and end all others silently with status 1.

    The launcher ends the rest when one has ended; what these raise until then (a lost connection) would only hide the
    reason.
    """
    try:
        yield
    except Exception:
        if not is_first_to_fail():
            raise SystemExit(1) from None
        raise


def load_to_numbered_cpus() -> None:
    """Let `torch.load` restore to "cpu:0", as accelerate names the device of several processes on a CPU.

    transformers loads optimizer states to that device, and torch knows it as "cpu" alone.
    """
    try:
        torch.serialization.default_restore_location(torch.UntypedStorage(1), "cpu:0")
    except RuntimeError:
        # Before torch's own ten and more, each of which is asked in turn.
        torch.serialization.register_package(
            9, lambda storage: None, lambda storage, location: storage if location == "cpu:0" else None
        )
