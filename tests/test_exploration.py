"""The tables and figures of the exploration notebooks: worked values, and what must hold for any."""

import math

import IPython.display
import ipywidgets
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch import nn

from qurl.exploration import codes, gradients, uaq_step
from qurl.exploration.live import show_live
from qurl.models import resolve_model
from qurl.objectives import OBJECTIVES
from qurl.plots import explore

BOUNDS = {"eps_low": 0.2, "eps_high": 0.2, "cap": 2.0}


@pytest.fixture(scope="module")
def tiny():
    return transformers.AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype="float64").eval()


@pytest.fixture(scope="module")
def batch():
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("tiny"))
    return uaq_step.arithmetic_batch(tokenizer, sums=4, seed=0)


# Codes -------------------------------------------------------------------------------------------------------------


def test_weight_errors_of_a_row_by_hand():
    # Scale 1 with 8 bits: 0.4 becomes 0. With 3 bits the scale is 127/3, and 64 lies nearest to 2·127/3 = 84.67.
    weight = torch.tensor([[127.0, 0.4, 64.0]])
    norm = math.sqrt(127**2 + 0.4**2 + 64**2)
    named = [("model.layers.3.mlp.up_proj.weight", weight), ("model.norm.weight", torch.ones(3))]
    table = codes.weight_errors(named, [("int8", 8), ("int8", 3)])
    assert list(table["layer"]) == [3, 3] and set(table["projection"]) == {"up_proj"}
    assert list(table["format"]) == ["INT8", "INT8, 3 bits used"]
    expected = [0.4 / norm, math.hypot(0.4, 2 * 127 / 3 - 64) / norm]
    assert table["error"].tolist() == pytest.approx(expected, rel=1e-5)


class Reader(nn.Module):
    """One projection, and an embedding that gives it known tokens."""

    device = torch.device("cpu")

    def __init__(self, tokens: torch.Tensor):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"down_proj": nn.Linear(tokens.shape[1], 1)})])
        self.tokens = tokens

    def forward(self, input_ids):
        return self.layers[0]["down_proj"](self.tokens[input_ids])


def test_activation_errors_by_hand():
    # Token 0 has scale 1 and loses 0.4; token 1 is all codes. FP8: 127 → 128 at a scale of 127/448 is code 448 exactly.
    model = Reader(torch.tensor([[127.0, 0.4], [-127.0, 64.0]]))
    table = codes.activation_errors(model, [0, 0, 1], ["int8"])
    assert table["error"].tolist() == pytest.approx([0.4 / math.hypot(127, 0.4)], rel=1e-5)
    assert table["peak"].tolist() == pytest.approx([127 / math.sqrt((127**2 + 0.16) / 2)], rel=1e-5)
    assert not model.layers[0]["down_proj"]._forward_pre_hooks


def test_precision_table_counts_every_parameter_once(tiny):
    table = codes.precision_table(tiny)
    assert table["parameters"].sum() == tiny.num_parameters() and table["share"].sum() == pytest.approx(1)
    projections = [module for module in tiny.model.layers.modules() if isinstance(module, nn.Linear)]
    row = table.loc["projections"]
    assert row["parameters"] == sum(linear.weight.numel() for linear in projections)
    # One byte per code, four per row.
    assert row["copy_mb"] == pytest.approx(
        sum(linear.weight.numel() + 4 * linear.out_features for linear in projections) / 1e6
    )
    assert (table.drop("projections")["copy_mb"] == table.drop("projections")["bf16_mb"]).all()


def test_sampled_logps_are_the_model_loss(tiny):
    prompt, completion = [12, 9, 7, 13], [4, 7, 8]
    (logps,) = codes.sampled_logps(tiny, [prompt + completion], [completion])
    labels = torch.tensor([[-100] * len(prompt) + completion])
    with torch.no_grad():
        loss = tiny(torch.tensor([prompt + completion]), labels=labels).loss.item()
    assert len(logps) == 3 and -np.mean(logps) == pytest.approx(loss, rel=1e-5)


# Gradients ---------------------------------------------------------------------------------------------------------

tokens = st.tuples(st.floats(0.1, 10), st.floats(0.05, 3), st.floats(-2, 2).filter(lambda a: abs(a) > 0.01))


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(token=tokens)
def test_gradient_is_the_slope_of_the_value(objective, token):
    w, ratio, advantage = token
    h = 1e-4
    edges = (0.8, 1.2, 0.8 / w, 1.2 / w, 1.2 * w / 2)
    if any(abs(math.log(ratio / edge)) < 10 * h for edge in edges):
        return
    value = {
        step: gradients.objective_and_gradient(objective, w, ratio * math.exp(step), advantage, **BOUNDS)[
            0
        ].item()
        for step in (-h, h)
    }
    _, gradient = gradients.objective_and_gradient(objective, w, ratio, advantage, **BOUNDS)
    assert gradient.item() == pytest.approx((value[h] - value[-h]) / (2 * h), rel=1e-3, abs=1e-6)


def test_curves_of_the_worked_token():
    """method.md: w = 4, R = 1.5, A = +1: ACR 3.0 with a gradient, TIS 2.4 without."""
    table = gradients.objective_curves(4.0, 1.0, ratios=[1.5], **BOUNDS).set_index("objective")
    assert list(table.index) == list(OBJECTIVES)
    assert table.loc["acr", ["value", "gradient"]].tolist() == pytest.approx([3.0, 3.0])
    assert table.loc["tis", ["value", "gradient"]].tolist() == pytest.approx([2.4, 0.0])


def test_map_is_the_wedge_between_the_two_bounds():
    grid = gradients.gradient_map(**BOUNDS)
    w, ratio, positive = grid["w"], grid["ratio"], grid["advantage"] > 0
    upper = 1.2 * np.maximum(1, w / 2)
    # Points on a bound may fall on either side by rounding.
    clear = (abs(ratio - 1.2) > 1e-3) & (abs(ratio - 0.8) > 1e-3) & (abs(ratio - upper) > 1e-3)
    assert clear.mean() > 0.97
    assert (grid["tis"] == np.where(positive, ratio < 1.2, ratio > 0.8))[clear].all()
    assert (grid["acr"] == np.where(positive, ratio < upper, ratio > 0.8))[clear].all()


def test_shares_are_those_of_the_normal_distribution():
    spread = 0.15
    table = gradients.gradient_shares(0.3, spread, **BOUNDS)

    def below(bound):  # P(R < bound) for log R ~ N(−spread²/2, spread)
        return 0.5 * (1 + math.erf((math.log(bound) + spread**2 / 2) / spread / math.sqrt(2)))

    expected = 0.5 * below(1.2) + 0.5 * (1 - below(0.8))
    for objective in ("proximal", "decoupled", "tis"):
        assert table.loc[objective, "with_gradient"] == pytest.approx(expected, abs=2e-3)
    assert table.loc["naive", "with_gradient"] < expected - 0.1
    assert table.loc["acr", "with_gradient"] > table.loc["tis", "with_gradient"]


# UAQ ---------------------------------------------------------------------------------------------------------------


def test_batch_pairs_right_and_wrong_answers(batch):
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("tiny"))
    texts = [
        tokenizer.decode(row, skip_special_tokens=True).replace(" ", "")
        for row in batch["input_ids"].tolist()
    ]
    for text, advantage in zip(texts, batch["advantages"].tolist(), strict=True):
        left, right = text.split("=")
        assert int(right) - sum(map(int, left.split("+"))) == (0 if advantage > 0 else 1)
    # Answer and end token count, prompt and padding do not.
    assert batch["mask"].sum(1).tolist() == [len(text.split("=")[1]) + 1 for text in texts]


@pytest.mark.parametrize(("optimizer", "power"), [("adamw", 1), ("sgd", 2)])
def test_step_gains(tiny, batch, optimizer, power):
    before = {name: parameter.detach().clone() for name, parameter in tiny.named_parameters()}
    table = uaq_step.step_gains(tiny, batch, [2.0], {optimizer: 1e-4})
    assert all(torch.equal(parameter, before[name]) for name, parameter in tiny.named_parameters())
    gain = table.pivot(index="arm", columns="group", values="gain")
    for arm in ("uaq", "control"):
        assert gain.loc[arm].to_dict() == pytest.approx(
            {
                "linears behind norms": 2**power,
                "norms in front of them": 0.5**power,
                "other matrices": 1,
                "other norms": 1,
            },
            rel=2e-3,  # AdamW's eps is divided by s
        )
    assert gain.loc["higher rate"].tolist() == pytest.approx([2.0] * 4, rel=1e-6)
    first = table.groupby("arm").first()
    assert first.loc["uaq", "from_control"] < 1e-9 < 0.1 < first.loc["higher rate", "from_control"]
    # Powers of two leave every code where the control arm has it.
    assert first.loc["uaq", "codes_changed"] == first.loc["control", "codes_changed"]
    assert first.loc["uaq", "codes_changed"] > first.loc["uaq", "codes_changed_plain"] > 0


def test_equal_for_several_steps(tiny, batch):
    arms = [
        uaq_step.take_step(tiny, batch, arm, 1.5, "adamw", 1e-5, steps=4)[0] for arm in ("uaq", "control")
    ]
    for name, update in arms[0].items():
        torch.testing.assert_close(update, arms[1][name], rtol=1e-6, atol=1e-12)


def test_unknown_arm(tiny, batch):
    with pytest.raises(ValueError, match=r"^arm='both' is not known: use one of 'plain', 'uaq', 'control'"):
        uaq_step.take_step(tiny, batch, "both", 1.5, "sgd", 1e-3)


def test_codes_moved(tiny):
    table = uaq_step.codes_moved_by_uaq(tiny, [1.5, 2.0]).set_index("scale")
    layers = tiny.model.layers
    expected = sum(
        getattr(layer.self_attn, f"{kind}_proj").weight.numel() for layer in layers for kind in "qkv"
    ) + sum(getattr(layer.mlp, f"{kind}_proj").weight.numel() for layer in layers for kind in ("gate", "up"))
    assert (table["codes"] == expected).all()
    assert table.loc[2.0, "changed"] == 0 and table.loc[2.0, "scale_ratio_error"] == 0
    assert 0 < table.loc[1.5, "changed"] < 0.005 * expected
    assert table.loc[1.5, "scale_ratio_error"] < 1e-6


# Controls and figures ----------------------------------------------------------------------------------------------


def test_live_redraws_with_the_new_value(monkeypatch):
    shown, updates = [], []

    class Handle:
        def update(self, drawing):
            updates.append(drawing)

    def display(drawing, display_id=False):
        shown.append(drawing)
        return Handle() if display_id else None

    monkeypatch.setattr(IPython.display, "display", display)
    slider = ipywidgets.FloatSlider(1.0, min=0, max=4)
    show_live(lambda w, name: f"{name} {w}", w=slider, name=ipywidgets.Text("a"))
    assert shown[1] == "a 1.0" and slider in shown[0].children
    slider.value = 2.5
    assert updates == ["a 2.5"]


def test_objectives_figure_draws_what_is_clipped_apart():
    curves = gradients.objective_curves(4.0, 1.0, **BOUNDS)
    figure = explore.objectives(curves, w=4.0, advantage=1.0, cap=2.0)
    assert isinstance(figure, Figure) and len(figure.axes) == 10
    for axes, objective in zip(figure.axes[:5], OBJECTIVES, strict=True):
        live, clipped = (line.get_ydata() for line in axes.lines[:2])
        rows = curves[curves["objective"] == objective]
        # Each point of the curve is on one of the two, by its gradient.
        assert (np.isnan(live) == (rows["gradient"] == 0).to_numpy()).all()
        assert np.where(np.isnan(live), clipped, live) == pytest.approx(rows["value"].to_numpy())
    assert "r = min(1, C/w) = 0.5" in figure.get_suptitle()


def test_map_figure_names_only_what_it_shows():
    grid = gradients.gradient_map(**BOUNDS)
    figure = explore.gradient_map(grid, cap=2.0, eps_high=0.2)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "gradient: ACR only" in labels and "gradient: TIS only" not in labels
    (shown,) = figure.axes[0].collections
    positive = grid[grid["advantage"] > 0]
    assert (shown.get_array() == 2).sum() == (positive["acr"] & ~positive["tis"]).sum() > 0


def test_mismatch_figure_shows_kl_beside_the_papers():
    frame = pd.DataFrame({"format": ["INT8"] * 3, "log_w": [0.5, -0.1, 0.0]})
    kl = pd.DataFrame({"kl": [0.01], "standard_error": [0.02]}, index=["INT8"])
    left, right = explore.mismatch(frame, kl).axes
    # Two of three tokens have |log w| of 0.1 or more, one 0.5.
    assert left.lines[0].get_xdata().tolist() == [0.0, 0.1, 0.5]
    assert left.lines[0].get_ydata() == pytest.approx([1, 2 / 3, 1 / 3])
    assert [line.get_xdata()[0] for line in right.lines[-2:]] == [0.002, 0.025]
