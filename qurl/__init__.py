"""Reinforcement learning of reasoning models with quantized rollouts.

The names below are loaded on first use (PEP 562), so ``import qurl`` is quick and needs neither torch nor
vLLM.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "FORMATS": "qurl.quantization",
    "quantize": "qurl.quantization",
    "dequantize": "qurl.quantization",
    "export_checkpoint": "qurl.quantization",
    "apply_uaq": "qurl.uaq",
    "undo_uaq": "qurl.uaq",
    "resolve_model": "qurl.models",
    "RolloutEngine": "qurl.rollout",
    "QuRLConfig": "qurl.config",
    "QuRLTrainer": "qurl.trainer",
    "OBJECTIVES": "qurl.objectives",
    "token_loss": "qurl.objectives",
    "load_task": "qurl.tasks",
    "evaluate": "qurl.evaluation",
    "measure_rollout": "qurl.benchmark",
    "is_correct": "qurl.answers",
    "extract_answer": "qurl.answers",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name):
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'qurl' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
