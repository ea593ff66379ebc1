"""The vLLM seam: build an engine for this machine, keep its quantized weights in step with a policy, sample from it.

Importing this package imports neither vLLM nor torch; asking for an engine does.
"""

import importlib

_PUBLIC = {
    "RolloutEngine": "engine",
    "Rollouts": "engine",
    "SyncReport": "sync",
    "RolloutError": "engine",
    "RolloutServer": "server",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
