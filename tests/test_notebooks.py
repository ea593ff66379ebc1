"""The exploration notebooks, executed by papermill: the numbers they print and the pictures they show."""

import base64
import io
import re

import nbformat
import numpy as np
import pytest
from matplotlib.image import imread

from qurl import notebook

# Beside other jobs a notebook takes many times as long.
pytestmark = pytest.mark.timeout(900)

NOTEBOOKS = notebook.project_root() / "notebooks"


def _is_widget(data: dict) -> bool:
    return "application/vnd.jupyter.widget-view+json" in data and "Slider(" in data["text/plain"]


class Executed:
    """Outputs of an executed notebook: printed text, text of displayed values, pictures."""

    def __init__(self, path):
        outputs = [out for cell in nbformat.read(path, 4).cells for out in cell.get("outputs", [])]
        assert not [out for out in outputs if out.output_type == "error"]
        self.printed = "".join(out.text for out in outputs if out.get("name") == "stdout")
        self.warnings = "".join(out.text for out in outputs if out.get("name") == "stderr")
        shown = [out.data for out in outputs if "data" in out]
        self.values = "\n".join(data.get("text/plain", "") for data in shown)
        self.pictures = [
            imread(io.BytesIO(base64.b64decode(data["image/png"])))[..., :3]
            for data in shown
            if "image/png" in data
        ]
        self.controls = sum(map(_is_widget, shown))

    def row(self, label: str, text: str | None = None) -> list[float]:
        """The numbers of the first line that begins with ``label``, signs of percent dropped."""
        line = re.search(
            rf"^ *{re.escape(label)} (.*)$", self.printed if text is None else text, re.MULTILINE
        )
        return [float(word.rstrip("%")) for word in line[1].split()]


def execute(name: str, folder, **parameters) -> Executed:
    return Executed(notebook.run(NOTEBOOKS / f"{name}.ipynb", folder / f"{name}.ipynb", parameters))


def assert_pictures(pictures: list[np.ndarray], count: int) -> None:
    assert len(pictures) == count
    for picture in pictures:
        height, width, _ = picture.shape
        assert height > 250 and width > 400
        # A frame without marks is well below one part in a hundred, and has no colour.
        assert (picture.min(2) < 0.9).mean() > 0.01
        assert (picture.max(2) - picture.min(2) > 0.3).mean() > 0.001


@pytest.mark.parametrize(
    "parameters",
    [
        {"model": "tiny", "max_tokens": 8},
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_quantization(tmp_path, parameters):
    pytest.importorskip("vllm")
    done = execute("10_quantization", tmp_path, **parameters)
    assert_pictures(done.pictures, 5)
    # By hand: the largest weight has the largest code in each format, and 0.004/0.9·127 = 0.56 rounds to 1.
    assert "[[127.0, -44.0, 7.0, 1.0], [127.0, -44.0, 7.0, 1.0]]" in done.printed
    assert "[[448.0, -160.0, 26.0, 2.0], [448.0, -160.0, 26.0, 2.0]]" in done.printed
    # Median error of the weights, %: INT8 below FP8, and 4 bits far above.
    int8, fp8 = (done.row(name)[1] for name in ("INT8", "FP8"))
    stress = done.row("INT8, 4 bits used")[1]
    assert 0.5 < int8 < 2 and 2 < fp8 < 3 and 10 < stress < 25
    # The engine: KL(behav‖prox), standard error, tokens, mean |log w|, max w, share of w > 2.
    lines = done.printed[done.printed.index("standard_error") :]
    kl = {name: done.row(name, lines) for name in ("BF16", "INT8", "FP8", "INT8, 4 bits used")}
    assert all(row[2] > 100 for row in kl.values())
    assert 0 <= kl["BF16"][0] < 0.005 and kl["BF16"][3] < 0.05
    assert 0 < kl["INT8"][0] < 0.2 and 0 < kl["FP8"][0] < 0.2
    assert kl["INT8, 4 bits used"][0] > 3 * kl["INT8"][0]
    assert kl["INT8, 4 bits used"][3] > kl["INT8"][3] > kl["BF16"][3]


def test_objectives(tmp_path):
    done = execute("20_objectives", tmp_path)
    assert_pictures(done.pictures, 2)
    # Values, then gradients, of naive, proximal, decoupled, tis, acr: method.md's worked tokens.
    numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", done.values.split("with gradient")[0])]
    for expected in (
        [1.0, 1.5, 1.2, 1.2, 4.8, 2.4, 3.0],
        [-1.0, 1.5, -6.0, -1.5, -6.0, -3.0, -3.0],
        [1.25, 1.0, 1.5, 1.2, 1.2, 1.5, 1.5, 1.5],
    ):
        assert any(numbers[i : i + len(expected)] == expected for i in range(len(numbers))), expected
    # For A = −1 the two maps are equal; for A = +1 ACR keeps more.
    tis, acr = (
        float(x) for x in re.search(r"^ 1\.0 +([\d.]+)% .* ([\d.]+)%", done.printed, re.MULTILINE).groups()
    )
    assert acr > tis + 10
    low, high = re.search(r"^-1\.0 +([\d.]+)% .* ([\d.]+)%", done.printed, re.MULTILINE).groups()
    assert low == high
    # At the paper's KL the share of tokens with a gradient is the same for tis and acr to a hundredth of a percent.
    tis, acr, naive = (
        done.row(f"{name}, % of tokens with gradient", done.values) for name in ("tis", "acr", "naive")
    )
    assert tis[0] == acr[0] and abs(tis[1] - acr[1]) < 0.01 and acr[-1] > tis[-1]
    assert naive[-1] < naive[0] < tis[0]
    # The controls, and beside them a picture that needs no kernel.
    assert done.controls == 1


def test_objectives_with_other_parameters(tmp_path):
    """Where the weight is not truncated, the heat map has no wedge at this w, and the figure says r = 1."""
    done = execute("20_objectives", tmp_path, w=1.0, advantage=-1.0, eps_high="0.28", cap=4)
    assert_pictures(done.pictures, 2)
    tis, acr = (
        float(x) for x in re.search(r"^ 1\.0 +([\d.]+)% .* ([\d.]+)%", done.printed, re.MULTILINE).groups()
    )
    # A cap of 4 leaves w of 4 to 16 truncated, a third of the log axis.
    assert 5 < acr - tis < 20


def test_uaq(tmp_path):
    done = execute("30_uaq", tmp_path)
    assert_pictures(done.pictures, 1)
    # 4 layers of 5 linears and 2 norms.
    assert re.search(r"^28 of 38 tensors scaled", done.printed, re.MULTILINE)
    changes = re.findall(r"largest logit ([\d.]+), largest change ([\d.e+-]+)", done.printed)
    (fp32, fp64) = (float(change) / float(largest) for largest, change in changes)
    assert 1e-8 < fp32 < 1e-5 and fp64 < 1e-12
    before, after = re.findall(r"codes (\[.*?\])", done.printed)
    assert before == after
    # scale, codes, changed, scale_ratio_error, share: none for powers of two.
    moved = {
        float(line.split()[1]): int(line.split()[3])
        for line in done.values.splitlines()
        if re.match(r"^\d +[\d.]+ +1228800 ", line)
    }
    assert set(moved) == {1.25, 1.5, 2.0, 3.0, 4.0}
    assert moved[2.0] == moved[4.0] == 0 and 0 < moved[1.5] < 0.005 * 1228800
    # The control arm takes the same step.
    for optimizer in ("adamw", "sgd"):
        assert max(done.row(optimizer)) < 1e-9
    assert "adamw  linears behind norms     1.500 × α" in done.printed
    assert "sgd    linears behind norms     2.250 × α" in done.printed
    assert "sgd    norms in front of them   0.444 × α" in done.printed
    # The live table, measured: linears 1.5 times, norms 2/3 times, other matrices once; Table 4's arm all 1.5 times.
    assert done.row("uaq", done.values)[:3] == pytest.approx([1.5, 2 / 3, 1], rel=2e-3)
    assert done.row("higher rate", done.values)[:3] == pytest.approx([1.5] * 3, rel=1e-3)
    assert done.controls == 1


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("10_quantization", {"code_bits": 1}, "code_bits=1 must be greater than or equal to 2"),
        ("20_objectives", {"cap": 0.5}, "cap=0.5 must be greater than or equal to 1: pass e.g. -p cap 2.0."),
        ("30_uaq", {"sclae": 2.0}, "sclae is not a parameter of this notebook: use scale;"),
    ],
)
def test_bad_parameter_stops_at_once(tmp_path, name, parameters, sentence):
    with pytest.raises(Exception, match=f"ParameterError: {re.escape(sentence)}"):
        execute(name, tmp_path, **parameters)
