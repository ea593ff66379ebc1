"""What the notebooks of figures and tables share: their parameters, their runs, and the paper's claims."""

import shlex
from typing import Any, Literal

import pydantic

from qurl.experiments.matrix import MAX_SEEDS, runs
from qurl.experiments.orchestrator import Orchestrator, core_count
from qurl.experiments.paper import KL_COLLAPSE, KL_STABLE, NAIVE_CLIPPED_SHARE, TABLES
from qurl.experiments.results import Claim, Results, collect, judge
from qurl.experiments.store import RunStore
from qurl.notebook import ParameterError, Parameters, provenance


class FigureConfig(Parameters):
    """Parameters of a notebook that reads runs."""

    preset: Literal["smoke", "cpu", "paper"] = pydantic.Field(examples=["cpu"])
    seeds: int = pydantic.Field(ge=1, le=MAX_SEEDS, examples=[3])
    run_missing: bool = pydantic.Field(examples=[False])
    runs_dir: str = pydantic.Field(examples=["runs"])
    output_dir: str = pydantic.Field(examples=["runs/fig_objectives/cpu"])

    @pydantic.model_validator(mode="after")
    def _can_be_run(self):
        if self.run_missing and self.preset == "paper":
            raise ValueError(
                "run_missing=True is not possible with preset='paper', whose runs accelerate starts on GPUs: see qurl "
                "reproduce --preset paper --dry-run"
            )
        return self


def read_runs(figure: str, config: FigureConfig) -> Results:
    """The finished runs of a figure, after executing what is missing where ``run_missing`` is set.

    Raises
    ------
    ParameterError
        If no run is finished, with the command that makes them.
    """
    store = RunStore(config.runs_dir)
    if config.run_missing:
        wanted = runs([figure], config.preset, range(config.seeds))
        Orchestrator(store, core_count(), report=lambda line: print(line, flush=True)).fill(wanted)
    results = collect(store, figure, config.preset, config.seeds)
    command = f"qurl reproduce --preset {config.preset} --only {figure} --seeds {config.seeds}"
    if store.root != RunStore().root:
        command += f" --runs-dir {shlex.quote(str(store.root))}"
    if config.preset == "paper":
        command += " --dry-run"
    if not len(results.runs):
        fix = f"see {command}" if config.preset == "paper" else f"pass -p run_missing true, or run {command}"
        raise ParameterError(
            f"{store.root} holds no finished run of {figure} with preset={config.preset!r}: {fix}."
        )
    total = len(results.runs) + len(results.missing)
    print(f"{len(results.runs)} of {total} runs are finished.")
    if results.missing:
        print(f"The figure shows these alone. All of them: {command}")
    return results


def record(figure: str, config: FigureConfig, results: Results, **more: Any) -> dict[str, Any]:
    """What a figure's ``result.json`` says: provenance, a verdict per claim, the runs, and which are missing.

    Parameters
    ----------
    figure : str
        A key of ``CLAIMS``.
    config : FigureConfig
    results : Results
        Of `read_runs`.
    **more
        Further numbers of this figure.
    """
    claims = [
        judge(results.runs[results.runs["experiment"] == experiment], claim, config.preset)
        for experiment, claim in CLAIMS[figure]
    ]
    return (
        provenance(preset=config.preset, seeds=config.seeds)
        | {"claims": claims}
        | more
        | {"runs": results.runs.to_dict("records"), "missing": [spec.name for spec in results.missing]}
    )


def _order(table: str, experiment: str, *pairs: tuple[str, str, str]) -> list[tuple[str, Claim]]:
    """Claims that follow from two columns of a table: the left one is the better one."""
    paper = TABLES[table]
    return [
        (experiment, Claim(text, f"{paper[left]:g} against {paper[right]:g}", "after", left, ">", right))
        for left, right, text in pairs
    ]


def _uaq_control(scale: str) -> Claim:
    arm = f"int8-acr-uaq{scale}"
    text = f"UAQ, s = {scale}, against learning rates that amount to the same"
    return Claim(text, "no such arm", "after", arm, "=", f"{arm}rates")


CLAIMS: dict[str, list[tuple[str, Claim]]] = {
    "tab_gsm8k": _order(
        "tab_gsm8k",
        "gsm8k",
        ("bf16", "int8-naive", "INT8, naive: below BF16"),
        ("int8-tis", "int8-naive", "INT8: TIS is better than naive"),
        ("int8-acr", "int8-tis", "INT8: ACR is better than TIS"),
        ("bf16", "int8-acr", "INT8, ACR: still below BF16"),
        ("bf16", "fp8-naive", "FP8, naive: fails"),
        ("fp8-tis", "fp8-naive", "FP8: TIS is better than naive"),
        ("fp8-acr", "fp8-tis", "FP8: ACR is better than TIS"),
    ),
    "tab_dapo": [
        ("dapo", Claim("Naive collapses: it ends below its start", "0.001", "gain", "int8-naive", "<", 0.0)),
        *_order(
            "tab_dapo",
            "dapo",
            ("bf16", "int8-naive", "Naive: below BF16"),
            ("bf16", "int8-tis", "TIS: below BF16"),
            ("int8-acr", "int8-tis", "ACR is better than TIS"),
            ("int8-acr-uaq1.5", "int8-acr", "UAQ adds to ACR"),
            ("bf16", "int8-acr-uaq1.5", "ACR with UAQ: still below BF16"),
        ),
        ("dapo", _uaq_control("1.5")),
        (
            "dapo",
            Claim(
                "TIS: KL(behav‖prox) grows more than with BF16 rollouts",
                "no such arm; the cause is named as quantization",
                "kl_growth",
                "int8-tis",
                ">",
                "bf16",
            ),
        ),
    ],
    "tab_deepscaler": [
        *_order(
            "tab_deepscaler",
            "deepscaler",
            ("bf16", "int8-naive", "Naive: below BF16"),
            ("int8-tis", "int8-naive", "TIS is better than naive"),
            ("int8-acr", "int8-tis", "ACR is better than TIS"),
            ("int8-acr-uaq1.5", "int8-acr", "UAQ adds to ACR"),
            ("bf16", "int8-acr-uaq1.5", "ACR with UAQ: still below BF16"),
        ),
        ("deepscaler", _uaq_control("1.5")),
    ],
    "tab_uaq_ablation": [
        *_order(
            "tab_uaq_ablation",
            "dapo",
            ("int8-acr-uaq1.5", "int8-acr", "s = 1.5 is better than s = 1"),
            ("int8-acr-uaq1.5", "int8-acr-uaq2", "s = 1.5 is better than s = 2"),
            ("int8-acr-uaq1.5", "int8-acr-lr1.5x", "s = 1.5 is better than 1.5 times the learning rate"),
            ("int8-acr", "int8-acr-lr1.5x", "1.5 times the learning rate is worse than s = 1"),
            ("int8-acr", "int8-acr-lr2x", "Twice the learning rate is worse than s = 1"),
        ),
        ("dapo", _uaq_control("1.5")),
        ("dapo", _uaq_control("2")),
        (
            "dapo",
            Claim(
                "UAQ lets more codes change from sync to sync",
                "codes hardly ever change without it",
                "codes_changed",
                "int8-acr-uaq1.5",
                ">",
                "int8-acr",
            ),
        ),
    ],
    "fig_objectives": [
        (
            "dapo",
            Claim(
                "Naive: the reward falls", "to 0 within a few steps", "reward_change", "int8-naive", "<", 0.0
            ),
        ),
        (
            "dapo",
            Claim(
                "Naive clips more tokens than decoupled",
                f"a peak of {NAIVE_CLIPPED_SHARE:.1%}",
                "clip_peak",
                "int8-naive",
                ">",
                "int8-decoupled",
            ),
        ),
        (
            "dapo",
            Claim("Proximal stays stable", "no collapse", "gain", "int8-proximal", ">", 0.0),
        ),
        (
            "dapo",
            Claim("Proximal ends below BF16", "after about 800 steps", "after", "bf16", ">", "int8-proximal"),
        ),
        (
            "dapo",
            Claim(
                "Decoupled ends above naive", "stable longer", "after", "int8-decoupled", ">", "int8-naive"
            ),
        ),
    ],
    "fig_divergence": [
        (
            "dapo",
            Claim(
                "TIS: KL(behav‖prox) grows",
                f"{KL_STABLE} to {KL_COLLAPSE}, 12 times",
                "kl_growth",
                "int8-tis",
                ">",
                1.0,
            ),
        ),
        (
            "dapo",
            Claim(
                "ACR ends with a smaller KL than TIS", "stays small", "kl_last", "int8-acr", "<", "int8-tis"
            ),
        ),
        (
            "dapo",
            Claim(
                "ACR ends with more accuracy than TIS", "TIS collapses", "after", "int8-acr", ">", "int8-tis"
            ),
        ),
    ],
    "fig_convergence": [
        (experiment, Claim(f"{name}: {text}", "the curve lies higher", "reward_last", left, ">", right))
        for experiment, name, dtype in (
            ("dapo", "DAPO, INT8", "int8"),
            ("gsm8k", "GSM8K, INT8", "int8"),
            ("gsm8k", "GSM8K, FP8", "fp8"),
        )
        for text, left, right in (
            ("TIS ends above naive", f"{dtype}-tis", f"{dtype}-naive"),
            ("ACR ends above TIS", f"{dtype}-acr", f"{dtype}-tis"),
            ("BF16 ends above ACR", "bf16", f"{dtype}-acr"),
        )
    ],
}
"""The paper's claims by figure, each with the experiment whose runs it is about."""
