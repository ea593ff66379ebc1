"""Which runs each figure and table of the paper needs, by preset: arms (a column of a table, a curve) times seeds."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from qurl.experiments.recipes import STRESS_BITS
from qurl.experiments.specs import RunSpec


class Arm(NamedTuple):
    """One column of a table or curve of a figure: its name for claims, its name for people, its parameters."""

    key: str
    label: str
    spec: dict[str, Any]

    def run(self, preset: str, seed: int) -> RunSpec:
        """Its run with one seed."""
        return RunSpec(**self.spec, preset=preset, seed=seed)


_LABELS = {
    "naive": "naive",
    "proximal": "proximal",
    "decoupled": "decoupled",
    "tis": "TIS (FlashRL)",
    "acr": "ACR (QuRL)",
}
MAX_SEEDS = 100

# Optimizer steps of the long runs, in which TIS parts from ACR. The paper's collapse is at about 1,000 of its steps,
# which it does not define: 1,000 of its rollout batches are 16,000.
_LONG = {"smoke": 8, "cpu": 3000, "paper": 16_000}


def _arm(experiment: str, dtype: str, objective: str, preset: str, **more: Any) -> Arm:
    # The embedded model is too easy for 8-bit codes: DAPO and DeepScaleR run with fewer code levels, and say so.
    bits = STRESS_BITS if preset != "paper" and experiment != "gsm8k" and dtype == "int8" else 8
    key, label = (dtype, "BF16") if dtype == "bf16" else (f"{dtype}-{objective}", dtype.upper())
    if dtype != "bf16":
        label += f"{f' {bits}-bit codes' if bits != 8 else ''}, {_LABELS[objective]}"
    if (scale := more.get("uaq_scale", 1)) != 1:
        control = more.get("uaq_mode", "fold") != "fold"
        key += f"-uaq{scale:g}" + ("rates" if control else "")
        label += f" + rates of UAQ {scale:g}" if control else f" + UAQ {scale:g}"
    if (factor := more.get("learning_rate_factor", 1)) != 1:
        key += f"-lr{factor:g}x"
        label += f", {factor:g} × rate"
    spec = {"experiment": experiment, "dtype": dtype, "objective": objective, "code_bits": bits}
    return Arm(key, label, spec | more)


def _uaq(experiment: str, preset: str, scale: float) -> list[Arm]:
    """UAQ, and the control arm without which it cannot be told from a learning rate."""
    return [
        _arm(experiment, "int8", "acr", preset, uaq_scale=scale, uaq_mode=mode)
        for mode in ("fold", "learning_rates")
    ]


def _gsm8k(preset: str) -> list[Arm]:
    return [
        _arm("gsm8k", "bf16", "tis", preset),
        *(
            _arm("gsm8k", dtype, objective, preset)
            for dtype in ("int8", "fp8")
            for objective in ("naive", "tis", "acr")
        ),
    ]


def _dapo(preset: str) -> list[Arm]:
    arms = [
        _arm("dapo", "bf16", "tis", preset),
        *(_arm("dapo", "int8", objective, preset) for objective in _LABELS),
        *_uaq("dapo", preset, 1.5),
    ]
    if preset == "paper":
        arms += [
            _arm("dapo", "fp8", "tis", preset),
            _arm("dapo", "fp8", "acr", preset),
            _arm("dapo", "fp8", "acr", preset, uaq_scale=1.5),
        ]
    return arms


def _deepscaler(preset: str) -> list[Arm]:
    return [
        _arm("deepscaler", "bf16", "tis", preset),
        *(_arm("deepscaler", "int8", objective, preset) for objective in ("naive", "tis", "acr")),
        *_uaq("deepscaler", preset, 1.5),
    ]


def _uaq_ablation(preset: str) -> list[Arm]:
    return [
        _arm("dapo", "int8", "acr", preset),
        *_uaq("dapo", preset, 1.5),
        *_uaq("dapo", preset, 2.0),
        _arm("dapo", "int8", "acr", preset, learning_rate_factor=1.5),
        _arm("dapo", "int8", "acr", preset, learning_rate_factor=2.0),
    ]


def _long_pair(preset: str) -> list[Arm]:
    return [_arm("dapo", "int8", objective, preset, steps=_LONG[preset]) for objective in ("tis", "acr")]


def _some(arms: list[Arm], *objectives: str) -> list[Arm]:
    return [arm for arm in arms if arm.spec["dtype"] == "bf16" or arm.spec["objective"] in objectives]


_NEEDS = {
    "fig_objectives": lambda preset: _some(_dapo(preset), "naive", "proximal", "decoupled"),
    "fig_convergence": lambda preset: _dapo(preset) + _gsm8k(preset),
    "tab_dapo": _dapo,
    "tab_gsm8k": _gsm8k,
    "fig_divergence": _long_pair,
    "tab_deepscaler": _deepscaler,
    "tab_uaq_ablation": _uaq_ablation,
}
FIGURES = tuple(_NEEDS)
"""The pipelines that read runs, in the order in which a matrix is filled."""


def arms(figure: str, preset: str) -> list[Arm]:
    """The arms that a figure or table shows."""
    return _NEEDS[figure](preset)


def runs(figures: Iterable[str], preset: str, seeds: Iterable[int]) -> list[RunSpec]:
    """The runs that figures need, each once: all arms with the first seed, then with the next."""
    wanted = [arm.run(preset, seed) for seed in seeds for figure in figures for arm in arms(figure, preset)]
    return list(dict.fromkeys(wanted))
