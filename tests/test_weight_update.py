"""Updates of a real RL step against quantization error: what UAQ multiplies, and the notebook of Figs. 4 and 9."""

import dataclasses
import json

import matplotlib.image
import nbformat
import numpy as np
import pandas as pd
import pytest

from qurl import notebook
from qurl.experiments import weight_update
from qurl.experiments.update_claims import gains, summarize, weight_update_claims
from qurl.experiments.weight_update import (
    BATCH,
    FIRST,
    LINEARS,
    NORMS,
    OTHERS,
    PRESETS,
    Batch,
    RecordedRollouts,
    WeightUpdateConfig,
    measure_updates,
    sample_batch,
)
from qurl.rollout import Rollouts

ROOT = notebook.project_root()
PARAMETERS = {
    "dtype": "int8", "model": "", "task": "", "learning_rate": 1e-6, "sgd_learning_rate": 1e-2, "steps": 0,
    "preset": "smoke", "seed": 0, "output_dir": "",
}  # fmt: skip
# AdamW's paper rate of 1e-6 is so close to the resolution of FP32 that gains on norms come out to a few percent only.
SETTINGS = dataclasses.replace(
    PRESETS["smoke"], scales=(1.0, 1.5, 2.0), learning_rate=1e-4, sgd_learning_rate=0.1
)


@pytest.fixture(scope="module")
def batch():
    pytest.importorskip("vllm")
    return sample_batch(SETTINGS)


@pytest.fixture(scope="module")
def updates(batch):
    return measure_updates(SETTINGS, batch)


# What UAQ multiplies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "weights", "at_1_5", "at_2"),
    [
        ("sgd", LINEARS, 2.25, 4.0),
        ("sgd", OTHERS, 1.0, 1.0),
        ("sgd", NORMS, 1 / 2.25, 0.25),
        ("adamw", LINEARS, 1.5, 2.0),
        ("adamw", OTHERS, 1.0, 1.0),
        ("adamw", NORMS, 1 / 1.5, 0.5),
    ],
)
def test_gain_of_the_first_step(updates, optimizer, weights, at_1_5, at_2):
    table = gains(updates).query("optimizer == @optimizer and weights == @weights and window == @FIRST")
    table = table.set_index("s")
    for s, expected in ((1.0, 1.0), (1.5, at_1_5), (2.0, at_2)):
        assert table.loc[s, "predicted"] == pytest.approx(expected)
        # Every single weight, not only the median one.
        assert table.loc[s, ["gain", "low", "high"]].tolist() == pytest.approx([expected] * 3, rel=1e-3)


def test_gradients_on_scaled_weights_grow_by_s(updates):
    sizes = updates.gradients.pivot(index="layer", columns="s", values="gradient_rms")
    growth = sizes[2.0] / sizes[1.0]
    scaled = updates.layers.drop_duplicates("layer").set_index("layer")["weights"] == LINEARS
    assert growth[scaled].tolist() == pytest.approx([2.0] * scaled.sum(), rel=1e-4)
    assert growth[~scaled].tolist() == pytest.approx([1.0] * (~scaled).sum(), rel=1e-4)


def test_first_steps_are_those_of_the_optimizers(updates):
    """AdamW: α for every weight, whatever its gradient. SGD: α times the gradient."""
    first = updates.layers.query("window == @FIRST and dtype == 'int8' and s == 1").set_index("layer")
    adamw = first.query("optimizer == 'adamw'")["update_rms"]
    # Its eps of 1e-8 holds back the few weights with gradients of that size.
    assert adamw.tolist() == pytest.approx([1e-4] * len(adamw), rel=5e-3)
    sgd = first.query("optimizer == 'sgd'")["update_rms"]
    gradient = updates.gradients.query("s == 1").set_index("layer")["gradient_rms"]
    assert sgd.tolist() == pytest.approx((0.1 * gradient[sgd.index]).tolist(), rel=1e-3)
    later = updates.steps.query("optimizer == 'adamw' and step == 2")["update_rms"]
    assert (later < 1e-4).all()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_error_over_weight_does_not_change(updates, dtype):
    table = summarize(updates).query("dtype == @dtype and window == @FIRST and optimizer == 'adamw'")
    table = table.set_index(["weights", "s"])[["error_rms", "error_to_weight", "update_to_error"]]
    for s in (1.5, 2.0):
        relative = table.loc[(LINEARS, s)] / table.loc[(LINEARS, 1.0)]
        assert relative["error_rms"] == pytest.approx(1 / s, rel=1e-4)
        assert relative["error_to_weight"] == pytest.approx(1, rel=1e-4)
        assert relative["update_to_error"] == pytest.approx(s, rel=1e-3)


def test_all_arms_train_on_one_batch(batch, updates):
    assert updates.steps["reward"].nunique() == 1
    assert 0 < updates.steps["reward"].iloc[0] < 1
    assert len(batch.rollouts.completion_ids) == SETTINGS.steps * SETTINGS.batch_size
    # A power of two keeps every code and every completion; the arms' batch does not depend on it.
    resampled = batch.resampled.set_index("s")
    for s in (1.0, 2.0):
        assert resampled.loc[s].tolist() == [1.0, 0.0, 0.0]
    assert 0 <= resampled.loc[1.5, "codes_moved_int8"] < 0.01


def test_tables_hold_every_weight(updates):
    layers = updates.layers
    assert layers["layer"].nunique() == 4 * 7
    assert set(layers["projection"]) == {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    unscaled = layers[layers["weights"] == OTHERS]
    assert set(unscaled["projection"]) == {"o_proj", "down_proj"}
    assert set(layers["depth"]) == {0, 1, 2, 3}
    assert set(layers["window"]) == {FIRST, BATCH}
    assert len(layers) == 2 * 3 * 2 * 2 * 28
    # Two norms in a decoder layer; the last norm of the model is none of UAQ's.
    assert updates.norms["layer"].nunique() == 8
    assert not layers.drop(columns=["layer"]).isna().any().any()


# Claims ----------------------------------------------------------------------------------------------------------


def test_s_squared_holds_under_sgd_alone(updates):
    claims = weight_update_claims(updates, SETTINGS, "cpu")
    verdicts = {claim["claim"]: claim["verdict"] for claim in claims}
    assert verdicts["UAQ raises update over error by s², SGD"] == "reproduced"
    assert verdicts["UAQ raises update over error by s², AdamW"] == "not reproduced"
    assert verdicts["UAQ divides the quantization error of the scaled layers by s"] == "reproduced"
    # The rate of these tests is a hundred times the paper's.
    assert verdicts["An update of a weight is 1e-7 to 1e-6 (Fig. 4)"] == "not reproduced"


def test_smoke_judges_no_model(updates):
    claims = weight_update_claims(updates, SETTINGS, "smoke")
    assert [claim["verdict"] for claim in claims[:5]] == ["not testable with this preset"] * 5
    assert all(claim["verdict"] != "not testable with this preset" for claim in claims[5:])
    assert all(claim["paper"] and claim["ours"] and claim["reason"] for claim in claims)


def test_a_stopped_measurement_goes_on(batch, updates, tmp_path, monkeypatch):
    """Its numbers are those of one that was not stopped; with other settings nothing is taken over."""
    settings, finished = dataclasses.replace(SETTINGS, scales=(1.0,)), tmp_path / "new" / "arms"

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_updates(settings, batch, stop, finished)
    lines = []
    resumed = measure_updates(settings, batch, lines.append, finished)
    assert ["finished before" in line for line in lines] == [True, False]
    for name in ("layers", "norms", "gradients", "steps"):
        whole = getattr(updates, name).query("s == 1").reset_index(drop=True)
        pd.testing.assert_frame_equal(getattr(resumed, name), whole)

    def train(*arm):
        raise RuntimeError("trained")

    monkeypatch.setattr(weight_update, "_train_arm", train)
    measure_updates(settings, batch, None, finished)
    with pytest.raises(RuntimeError, match="trained"):
        measure_updates(dataclasses.replace(settings, learning_rate=2e-4), batch, None, finished)


# Recorded rollouts -----------------------------------------------------------------------------------------------


def test_recorded_completions_go_to_their_prompts():
    rollouts = Rollouts([[10], [11], [20, 21], [22]], [[-1.0], [-2.0], [-3.0, -4.0], [-5.0]], [], 0.0, 0, 0)
    recorded = RecordedRollouts(Batch(None, [[1], [2]], rollouts, None, {}), 2, "int8")
    prompts, ids, logps, tokens = recorded.generate([[2], [2], [1]], None, 2)
    assert prompts == [[2], [2], [1]]
    assert ids == [[20, 21], [22], [10]]
    assert logps == [[[-3.0], [-4.0]], [[-5.0]], [[-1.0]]]
    assert tokens == [[[20], [21]], [[22]], [[10]]]
    assert recorded.generate([[1]], None, 2)[1] == [[11]]
    with pytest.raises(IndexError):
        recorded.generate([[1]], None, 2)


# Parameters ------------------------------------------------------------------------------------------------------


def test_what_is_given_replaces_the_presets():
    config = notebook.parse(WeightUpdateConfig, PARAMETERS | {"steps": 4, "model": "org/name", "seed": 3})
    assert config.settings() == dataclasses.replace(PRESETS["smoke"], steps=4, model="org/name", seed=3)
    assert config.run_name() == "smoke-org/name-int8-steps4-seed3"
    assert notebook.parse(WeightUpdateConfig, PARAMETERS).run_name() == "smoke-tiny-int8"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("dtype", "bf16", "dtype='bf16' must be 'int8' or 'fp8': pass e.g. -p dtype int8."),
        ("learning_rate", 0, "learning_rate=0 must be greater than 0: pass e.g. -p learning_rate 1e-6."),
        ("steps", -1, "steps=-1 must be greater than or equal to 0: pass e.g. -p steps 6."),
    ],
)
def test_bad_parameters(name, value, sentence):
    with pytest.raises(notebook.ParameterError) as raised:
        notebook.parse(WeightUpdateConfig, PARAMETERS | {name: value})
    assert str(raised.value) == sentence


@pytest.mark.parametrize("name", ["n", "seed", "split"])
def test_task_options_that_other_settings_decide(name):
    with pytest.raises(
        ValueError, match=rf"^task_options\['{name}'\]=1 is not possible: leave it out, as .+\.$"
    ):
        dataclasses.replace(SETTINGS, task_options={name: 1})


# The notebook ----------------------------------------------------------------------------------------------------


def test_notebook(tmp_path):
    pytest.importorskip("vllm")
    folder = tmp_path / "new" / "results"
    output = notebook.run(
        ROOT / "pipelines" / "fig_weight_update.ipynb",
        tmp_path / "out.ipynb",
        {"preset": "smoke", "output_dir": str(folder)},
    )
    tables = {f"{name}.csv" for name in ("fig_weight_update", "gains", "norms", "gradients", "steps")}
    pictures = {"fig_weight_update.svg", "fig_weight_update.png"}
    assert {path.name for path in folder.iterdir()} == tables | pictures | {"result.json"}
    result = json.loads((folder / "result.json").read_text())
    assert result["settings"]["scales"] == [1.0, 1.5] and result["settings"]["steps"] == 2
    assert len(result["claims"]) == 8
    gain = pd.DataFrame(result["gains"]).set_index(["optimizer", "s", "window", "weights"])["gain"]
    assert gain["sgd", 1.5, FIRST, LINEARS] == pytest.approx(2.25, rel=1e-3)
    assert gain["adamw", 1.5, FIRST, LINEARS] == pytest.approx(1.5, rel=1e-2)
    steps = pd.read_csv(folder / "steps.csv").query("optimizer == 'adamw'")
    assert steps.query("step == 1")["update_rms"].tolist() == pytest.approx([1e-6, 1e-6], rel=1e-2)
    for dtype in ("int8", "fp8"):
        (row,) = (
            row
            for row in result["summary"]
            if (row["optimizer"], row["s"], row["window"], row["dtype"], row["weights"])
            == ("adamw", 1.0, BATCH, dtype, LINEARS)
        )
        assert 0 < row["update_to_error"] < 0.1 and 0 <= row["codes_changed"] < 0.01
    # Each of the four panels has something drawn in it.
    image = matplotlib.image.imread(folder / "fig_weight_update.png")[..., :3]
    height, width = image.shape[0] // 2, image.shape[1] // 2
    for rows in (slice(0, height), slice(height, None)):
        for columns in (slice(0, width), slice(width, None)):
            drawn = np.ptp(image[rows, columns], axis=-1) > 0.2  # coloured, and not the grid
            assert 0.002 < drawn.mean() < 0.5
    text = "".join(
        out.get("text", "") for cell in nbformat.read(output, 4).cells for out in cell.get("outputs", [])
    )
    assert "UAQ raises update over error by s², AdamW: not reproduced" in text
    assert len(result["resampled"]) == 2
