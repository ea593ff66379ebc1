"""From finished runs to the numbers of a figure: a row per run, curves, means over seeds with intervals, verdicts.

Intervals over seeds are Student's t at 95 %. Two arms are compared by their difference under the same seed, which has
the same start, prompts and order; a claim counts as reproduced if the whole interval lies on its side, as not
reproduced if it lies on the other, and else as undecided.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
from scipy import stats

from qurl.experiments.matrix import arms
from qurl.experiments.specs import RunSpec
from qurl.experiments.store import Run, RunStore, accuracies
from qurl.plots import windowed

CONFIDENCE = 0.95
CURVES = (
    "reward",
    "mismatch/kl_k3",
    "mismatch/w_max",
    "clip_ratio/region_mean",
    "clip_ratio/high_mean",
    "rollout/codes_changed",
)
# First and last part of a run: a tenth of its steps.
_PART = 10
# Two runs that agree in all of these are one.
_FINGERPRINT = ("reward_last", "reward_change", "kl_first", "kl_last", "w_max")
# How a verdict names what it compares, and in what unit the difference is.
_TITLES = {
    "after": ("held-out accuracy", "points"),
    "gain": ("gain of held-out accuracy", "points"),
    "reward_last": ("mean reward of the last tenth", ""),
    "reward_change": ("mean reward, last tenth minus first", ""),
    "kl_last": ("KL(behav‖prox) of the last tenth", "nats per token"),
    "kl_growth": ("KL(behav‖prox), last tenth over first", "times"),
    "clip_peak": ("clipped tokens at their peak", "points"),
    "codes_changed": ("codes that a sync changes", "points"),
}


class Results(NamedTuple):
    """What the store holds of a figure.

    Attributes
    ----------
    runs : pandas.DataFrame
        A row per finished run: ``experiment``, ``arm``, ``label``, ``seed`` and the `measures` of it.
    curves : pandas.DataFrame
        ``experiment``, ``arm`` (its label), ``seed``, ``step`` and the metrics ``CURVES`` in windows of steps.
    missing : list of RunSpec
    """

    runs: pd.DataFrame
    curves: pd.DataFrame
    missing: list[RunSpec]


def measures(run: Run) -> dict[str, float]:
    """The numbers of a run that claims are about.

    Returns
    -------
    dict
        ``before``, ``after``, ``gain``: held-out accuracy in %, percentage points for the gain; ``after:NAME``: of a
        test set. ``reward_last``, ``kl_first``, ``kl_last``: means over the first and last tenth of the steps;
        ``reward_change``: the difference, ``kl_growth``: the ratio of the two. ``w_max``: of the whole run.
        ``clip_peak``: largest share of clipped tokens in a window of the run, %; ``codes_changed``: mean share of codes
        that a sync changes, %. ``hardware``, ``commit``: where the run comes from.
    """
    metrics = run.metrics.reindex(columns=list(CURVES))
    first, last = metrics.index.max() / _PART, metrics.index.max() * (1 - 1 / _PART)
    early, late = metrics[metrics.index <= max(first, metrics.index.min())], metrics[metrics.index > last]
    kl_first, kl_last = early["mismatch/kl_k3"].mean(), late["mismatch/kl_k3"].mean()
    return accuracies(run.result) | {
        "reward_last": late["reward"].mean(),
        "reward_change": late["reward"].mean() - early["reward"].mean(),
        "kl_first": kl_first,
        "kl_last": kl_last,
        "kl_growth": kl_last / kl_first,
        "w_max": metrics["mismatch/w_max"].max(),
        "clip_peak": 100 * curves(run)["clip_ratio/region_mean"].max(),
        "codes_changed": 100 * metrics["rollout/codes_changed"].mean(),
        "steps": run.result["steps"],
        "minutes": run.result["seconds"] / 60,
        "hardware": run.result.get("engine", {}).get("hardware"),
        "commit": run.result.get("git_commit"),
    }


def curves(run: Run) -> pd.DataFrame:
    """The metrics ``CURVES`` in windows of whole batches of rollouts, on whose first step nothing is clipped."""
    return windowed(run.metrics, CURVES, multiple=run.spec.steps_per_batch)


def collect(store: RunStore, figure: str, preset: str, seeds: int) -> Results:
    """Read the finished runs of a figure's arms."""
    rows, parts, missing = [], [], []
    for arm in arms(figure, preset):
        for seed in range(seeds):
            spec = arm.run(preset, seed)
            if store.state(spec) != "finished":
                missing.append(spec)
                continue
            run = store.load(spec)
            about = {"experiment": spec.experiment, "arm": arm.key, "label": arm.label, "seed": seed}
            rows.append(about | measures(run))
            parts.append(curves(run).assign(**about | {"arm": arm.label}))
    if not rows:
        return Results(pd.DataFrame(columns=["arm"]), pd.DataFrame(), missing)
    return Results(pd.DataFrame(rows), pd.concat(parts, ignore_index=True), missing)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of a few seeds and its 95 % interval by Student's t; NaN for the interval of a single one."""
    values = pd.Series(values, dtype=float).dropna()
    mean = values.mean()
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.sem()
    return mean, mean - half, mean + half


def scores(runs: pd.DataFrame, measure: str = "after", paper: dict[str, float] | None = None) -> pd.DataFrame:
    """Per arm: mean over seeds, interval, number of seeds, and the paper's value.

    Parameters
    ----------
    runs : pandas.DataFrame
        From `collect`.
    measure : str
        See `measures`.
    paper : dict, optional
        Value by arm.

    Returns
    -------
    pandas.DataFrame
        ``arm``, ``label``, ``mean``, ``low``, ``high``, ``seeds``, ``paper``.
    """
    rows = []
    for (arm, label), group in runs.groupby(["arm", "label"], sort=False):
        mean, low, high = mean_interval(group[measure])
        rows.append({"arm": arm, "label": label, "mean": mean, "low": low, "high": high, "seeds": len(group)})
    table = pd.DataFrame(rows)
    return table.assign(paper=table["arm"].map(paper or {}).astype(float))


def by_test_set(runs: pd.DataFrame, paper: dict[str, dict[str, float]]) -> pd.DataFrame:
    """A column per test set and row per arm, means over seeds beside the paper's; ours are NaN at a preset without.

    Parameters
    ----------
    runs : pandas.DataFrame
        From `collect`.
    paper : dict
        Accuracy in % by arm and test set.
    """
    sets = list(next(iter(paper.values())))
    ours = runs.groupby("arm", sort=False).mean(numeric_only=True)
    ours = ours.reindex(columns=[f"after:{name}" for name in sets]).set_axis(sets, axis=1)
    return pd.concat({"here": ours, "paper": pd.DataFrame(paper).T[sets]}, axis=1).rename_axis("arm")


class Claim(NamedTuple):
    """A statement of the paper, as a comparison.

    Attributes
    ----------
    text : str
    paper : str
        Its numbers.
    measure : str
        One of `measures` that ``_TITLES`` names.
    left : str
        An arm.
    relation : {">", "<", "="}
        Of left to right. "=" is a question of ours: nothing is claimed, the interval is reported.
    right : str or float
        Another arm, or a number.
    """

    text: str
    paper: str
    measure: str
    left: str
    relation: str
    right: str | float


def judge(runs: pd.DataFrame, claim: Claim, preset: str) -> dict[str, Any]:
    """A claim beside what was measured.

    Returns
    -------
    dict
        ``claim``, ``paper``, ``ours`` (text), ``verdict``: "reproduced", "not reproduced" (the opposite shows),
        "undecided" (the interval holds both, or there is none) or "not testable with this preset"; of a question of
        ours "they differ" or "no difference shown"; ``reason``; ``difference``, ``low``, ``high``, ``seeds``.
    """
    told = {"claim": claim.text, "paper": claim.paper, "ours": ""} | _compared(runs, claim)
    if preset == "smoke":
        told |= {"verdict": "not testable with this preset", "reason": "a few steps say nothing"}
    return told


def _compared(runs: pd.DataFrame, claim: Claim) -> dict[str, Any]:
    by_seed = {arm: group.set_index("seed")[claim.measure] for arm, group in runs.groupby("arm")}
    sides = [side for side in (claim.left, claim.right) if isinstance(side, str)]
    if absent := [side for side in sides if side not in by_seed]:
        return {"verdict": "undecided", "reason": f"no finished run of {absent[0]}"}
    of_arms = len(sides) == 2
    right = by_seed[claim.right] if of_arms else claim.right
    differences = (by_seed[claim.left] - right).dropna()
    if differences.empty:
        return {"verdict": "undecided", "reason": f"{claim.left} and {claim.right} have no seed in common"}
    mean, low, high = mean_interval(differences)
    numbers = {"difference": mean, "low": low, "high": high, "seeds": len(differences)}
    title, unit = _TITLES[claim.measure]
    if of_arms:
        ours = f"{claim.left} minus {claim.right}: {_interval(mean, low, high, unit, len(differences), '+')}"
    else:
        ours = f"{claim.left}: {_interval(mean + right, low + right, high + right, unit, len(differences))}"
    return numbers | {"ours": f"{title}, {ours}"} | _verdict(runs, claim, low, high, len(differences))


def _interval(mean: float, low: float, high: float, unit: str, seeds: int, sign: str = "") -> str:
    shown = f"{mean:{sign}.3g} {unit}".strip()
    return (
        f"{shown} (one seed)"
        if seeds < 2
        else f"{shown} ({low:{sign}.3g} to {high:{sign}.3g}, {seeds} seeds)"
    )


def _verdict(runs: pd.DataFrame, claim: Claim, low: float, high: float, seeds: int) -> dict[str, str]:
    if seeds < 2:
        return {"verdict": "undecided", "reason": "one seed has no interval"}
    if claim.relation == "=":
        verdict = "no difference shown" if low <= 0 <= high else "they differ"
        return {"verdict": verdict, "reason": "a question of ours, which the paper does not ask"}
    sign = 1 if claim.relation == ">" else -1
    if min(sign * low, sign * high) > 0:
        return {"verdict": "reproduced", "reason": "the whole interval is on the claim's side"}
    if max(sign * low, sign * high) < 0:
        return {"verdict": "not reproduced", "reason": "the opposite is shown"}
    reason = (
        f"the interval holds {'a difference of 0' if isinstance(claim.right, str) else f'{claim.right:g}'}"
    )
    if same := _same_runs(runs, claim):
        reason += f"; under {same} of {seeds} seeds both arms are the same run"
    return {"verdict": "undecided", "reason": reason}


def _same_runs(runs: pd.DataFrame, claim: Claim) -> int:
    """Under how many seeds the two arms agree in every measure: neither has done what the other does not."""
    if not isinstance(claim.right, str):
        return 0
    known = [name for name in _FINGERPRINT if name in runs]
    left, right = (runs[runs["arm"] == arm].set_index("seed")[known] for arm in (claim.left, claim.right))
    seeds = left.index.intersection(right.index)
    return int((left.loc[seeds] == right.loc[seeds]).all(axis=1).sum()) if known else 0
