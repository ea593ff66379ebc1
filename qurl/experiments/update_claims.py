"""What the updates of `qurl.experiments.weight_update` say: gains of UAQ, and a verdict per claim of the paper.

The paper (arXiv 2602.13953, Figs. 4 and 9) argues that the quantization error of W / s is s times smaller and an update
of it s times larger, together s². The second half holds where the update is proportional to the gradient, which AdamW's
is not (method: `qurl.uaq`).
"""

import pandas as pd

from qurl.experiments.weight_update import BATCH, DTYPES, FIRST, LINEARS, NORMS, OTHERS, Settings, Updates

# What a step in the function is multiplied by (method: qurl.uaq).
PREDICTED = {
    ("sgd", LINEARS): lambda s: s**2,
    ("sgd", OTHERS): lambda s: 1.0,
    ("sgd", NORMS): lambda s: s**-2,
    ("adamw", LINEARS): lambda s: s,
    ("adamw", OTHERS): lambda s: 1.0,
    ("adamw", NORMS): lambda s: 1 / s,
}
PAPER_UPDATE = (1e-7, 1e-6)
PAPER_WEIGHT = (1e-3, 1e-1)
PAPER_GRADIENT = (0.1, 1.0)
_SHOWN = {"sgd": "SGD", "adamw": "AdamW"}


def gains(updates: Updates) -> pd.DataFrame:
    """By what s multiplies a step in the function, beside what follows from the chain rule.

    A step ΔW' on W' = W / s is a step s ΔW' on W; one Δg' on g' = s g is Δg' / s on g. The gain of a weight is the size
    of that step over the size of the step without UAQ.

    Parameters
    ----------
    updates : Updates

    Returns
    -------
    pandas.DataFrame
        A row per ``optimizer``, ``s``, ``window`` and ``weights`` (q/k/v and gate/up, o and down, norms): ``gain``
        (median over the weights), ``low`` and ``high`` (smallest and largest), ``predicted``.
    """
    one_dtype = updates.layers[updates.layers["dtype"] == DTYPES[0]]
    rows = pd.concat([one_dtype, updates.norms], ignore_index=True)
    plain = rows[rows["s"] == 1].set_index(["optimizer", "window", "layer"])["function_update_rms"]
    keys = pd.MultiIndex.from_frame(rows[["optimizer", "window", "layer"]])
    rows["gain"] = rows["function_update_rms"] / plain.reindex(keys).to_numpy()
    table = rows.groupby(["optimizer", "s", "window", "weights"])["gain"].agg(["median", "min", "max"])
    table = table.set_axis(["gain", "low", "high"], axis=1).reset_index()
    table["predicted"] = [PREDICTED[row.optimizer, row.weights](row.s) for row in table.itertuples()]
    return table


def summarize(updates: Updates) -> pd.DataFrame:
    """Updates against quantization error over all layers that UAQ scales, and over those it does not.

    Parameters
    ----------
    updates : Updates

    Returns
    -------
    pandas.DataFrame
        A row per ``optimizer``, ``s``, ``window``, ``dtype`` and ``weights``: medians over layers of ``update_rms``,
        ``update_to_error``, ``error_to_weight`` and ``update_to_step``, and ``codes_changed`` over all codes.
    """
    rows = updates.layers.assign(
        error_to_weight=updates.layers["error_rms"] / updates.layers["weight_rms"],
        changed=updates.layers["codes_changed"] * updates.layers["codes"],
    )
    groups = rows.groupby(["optimizer", "s", "window", "dtype", "weights"])
    table = groups[
        ["update_rms", "error_rms", "update_to_error", "error_to_weight", "update_to_step"]
    ].median()
    table["codes_changed"] = groups["changed"].sum() / groups["codes"].sum()
    return table.reset_index()


def weight_update_claims(updates: Updates, settings: Settings, preset: str) -> list[dict[str, str]]:
    """The paper's claims about updates and UAQ beside what was measured.

    Parameters
    ----------
    updates : Updates
    settings : Settings
    preset : str
        With "smoke" what depends on the model is not judged; what follows from UAQ's definition is, with any model.

    Returns
    -------
    list of dict
        ``claim``, ``paper`` and ``ours`` (text), ``verdict`` ("reproduced", "not reproduced" or "not testable with this
        preset"), ``reason``.
    """
    of_model = [*_size_claims(updates, settings), _codes_claim(updates, settings)]
    if preset == "smoke":
        of_model = [
            claim
            | {
                "verdict": "not testable with this preset",
                "reason": "too small a model and too short a batch",
            }
            for claim in of_model
        ]
    return of_model + _uaq_claims(updates)


def _claim(claim: str, paper: str, ours: str, holds: bool, reason: str) -> dict[str, str]:
    verdict = "reproduced" if holds else "not reproduced"
    return {"claim": claim, "paper": paper, "ours": ours, "verdict": verdict, "reason": reason}


def _size_claims(updates: Updates, settings: Settings) -> list[dict[str, str]]:
    steps = updates.steps.query("optimizer == 'adamw' and s == 1")["update_rms"]
    weight = updates.magnitudes
    low, high = PAPER_UPDATE
    gradients = updates.gradients.query("s == 1")
    gradient = gradients["gradient_rms"].median()
    sgd_update = settings.learning_rate * gradient
    rows = updates.layers.query("optimizer == 'adamw' and s == 1").set_index(["window", "dtype"])
    first, batch = (
        {dtype: rows.loc[(window, dtype), "update_to_error"] for dtype in DTYPES} for window in (FIRST, BATCH)
    )
    steps_taken = f"{settings.steps} steps"
    return [
        _claim(
            "An update of a weight is 1e-7 to 1e-6 (Fig. 4)",
            f"α·G = {low:.0e} to {high:.0e}",
            f"AdamW, α = {settings.learning_rate:.0e}: {steps.iloc[0]:.2g} (RMS) in the first step, "
            f"{steps.iloc[1:].min():.2g} to {steps.iloc[1:].max():.2g} in the others",
            # AdamW's step is α to rounding, not always below it.
            low <= steps.min() <= steps.max() <= 1.01 * high,
            "AdamW's step is about α whatever the gradient: the first is α·sign(G)",
        ),
        _claim(
            "Weights are 1e-3 to 1e-1 (Fig. 4)",
            f"{PAPER_WEIGHT[0]:.0e} to {PAPER_WEIGHT[1]:.0e}",
            f"{weight['low']:.1e} to {weight['high']:.1e} (5 to 95 %), median {weight['median']:.1e}",
            PAPER_WEIGHT[0] <= weight["median"] <= PAPER_WEIGHT[1],
            f"judged by the median, of {settings.model}",
        ),
        _claim(
            "Gradients are G = 0.1 to 1, so that the update is α·G",
            f"G = {PAPER_GRADIENT[0]:g} to {PAPER_GRADIENT[1]:g}",
            f"RMS {gradient:.1e} (median layer): α·G would be {sgd_update:.1e}, and an SGD step at this rate would "
            f"leave {gradients['sgd_unmoved'].median():.1%} of a layer's FP32 weights as they are",
            PAPER_GRADIENT[0] <= gradient <= PAPER_GRADIENT[1],
            "the sizes above are AdamW's, not those of α·G",
        ),
        _claim(
            "An update is far smaller than the quantization error",
            "update far below the error (Figs. 4, 9)",
            "; ".join(
                f"{dtype.upper()}: {first[dtype].median():.1e} of it per step (median layer), "
                f"{batch[dtype].median():.1e} after {steps_taken}"
                for dtype in DTYPES
            ),
            all(ratios.max() < 0.1 for ratios in batch.values()),
            f"largest of any layer after {steps_taken}: {max(ratios.max() for ratios in batch.values()):.1e}",
        ),
    ]


def _codes_claim(updates: Updates, settings: Settings) -> dict[str, str]:
    rows = updates.layers.query("optimizer == 'adamw' and s == 1")
    shares = {
        (dtype, window): (part["codes_changed"] * part["codes"]).sum() / part["codes"].sum()
        for (dtype, window), part in rows.groupby(["dtype", "window"])
    }
    steps = rows.query("window == @BATCH").groupby("dtype")["update_to_step"].median()
    return _claim(
        "8-bit codes hardly ever change: the quantized policy stands still (Figs. 4, 9)",
        "hardly ever",
        "; ".join(
            f"{dtype.upper()}: {shares[dtype, FIRST]:.3%} of the codes in the first step, {shares[dtype, BATCH]:.3%} "
            f"after {settings.steps} steps (update over the distance of two codes: {steps[dtype]:.1e})"
            for dtype in DTYPES
        ),
        max(shares.values()) < 0.01,
        "judged as fewer than 1 % after the batch; but each that changes moves by a whole step, so that on average the "
        "codes follow the weights",
    )


def _uaq_claims(updates: Updates) -> list[dict[str, str]]:
    scale = max(updates.layers["s"])
    table = summarize(updates).query("window == @FIRST and weights == @LINEARS and dtype == 'int8'")
    at = {(row.optimizer, row.s): row for row in table.itertuples()}

    def ratio(optimizer: str, column: str) -> float:
        return getattr(at[optimizer, scale], column) / getattr(at[optimizer, 1.0], column)

    error, relative = ratio("adamw", "error_rms"), ratio("adamw", "error_to_weight")
    claims = [
        _claim(
            "UAQ divides the quantization error of the scaled layers by s",
            "error ∝ |W| / (s·2^b)",
            f"s = {scale:g}: the error is {error:.4f} times as large, error over weight {relative:.4f} times",
            abs(error * scale - 1) < 0.01,
            "the weights are divided by s as well: codes, and the error of the quantized policy, stay what they were",
        )
    ]
    reasons = {
        "sgd": "the gradient on W / s is s times larger, and so is an SGD step",
        "adamw": "AdamW's update does not grow with the gradient: the whole gain is that of a learning rate s·α",
    }
    for optimizer in ("sgd", "adamw"):
        growth = ratio(optimizer, "update_to_error")
        claims.append(
            _claim(
                f"UAQ raises update over error by s², {_SHOWN[optimizer]}",
                f"s² = {scale**2:g} for s = {scale:g}",
                f"{growth:.3f} times (s = {scale:g}; predicted here: {PREDICTED[optimizer, LINEARS](scale):g})",
                abs(growth / scale**2 - 1) < 0.05,
                reasons[optimizer],
            )
        )
    return claims
