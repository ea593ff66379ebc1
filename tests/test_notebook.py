"""Notebook parameters, output folders, provenance, saving; tests/test_pipelines.py has what needs a kernel."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pandas as pd
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qurl
from qurl import notebook
from qurl.notebook import IntList, ParameterError, Parameters, begin, output_folder, parse, project_root


class Config(Parameters):
    dtype: Literal["int8", "fp8"] = pydantic.Field(examples=["int8"])
    rate: float = pydantic.Field(gt=0, examples=["1e-6"])
    steps: int = pydantic.Field(ge=1)
    resume: bool
    sizes: IntList


VALUES = {"dtype": "int8", "rate": 1e-6, "steps": 3, "resume": False, "sizes": ""}
CELL = 'dtype: str = "int8"\nrate: float = 1e-6\nsteps: int = 3\nresume: bool = False\nsizes: str = ""'


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        ({"rate": "1e-6"}, 1e-6),
        ({"rate": 1}, 1.0),
        ({"steps": "8"}, 8),
        ({"steps": 8.0}, 8),
        ({"resume": "false"}, False),
        ({"resume": "True"}, True),
        ({"sizes": "8,64"}, (8, 64)),
        ({"sizes": "8, 64"}, (8, 64)),
        ({"sizes": "[8, 64]"}, (8, 64)),
        ({"sizes": [8, 64]}, (8, 64)),
        ({"sizes": 8}, (8,)),
        ({"sizes": ""}, ()),
    ],
)
def test_text_is_converted(given_value, expected):
    (name,) = given_value
    value = getattr(parse(Config, VALUES | given_value), name)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"dtype": "fp4"}, "dtype='fp4' must be 'int8' or 'fp8': pass e.g. -p dtype int8."),
        ({"rate": "fast"}, "rate='fast' must be a valid number: pass e.g. -p rate 1e-6."),
        ({"rate": -1}, "rate=-1 must be greater than 0: pass e.g. -p rate 1e-6."),
        ({"steps": "abc"}, "steps='abc' must be a valid integer."),
        ({"steps": 2.5}, "steps=2.5 must be a valid integer, got a number with a fractional part."),
        ({"steps": True}, "steps=True must not be true or false."),
        ({"steps": None}, "steps=None must be a valid integer."),
        ({"resume": "maybe"}, "resume='maybe' must be a valid boolean, unable to interpret input."),
        ({"sizes": "8,a"}, "sizes='8,a' must be a valid integer."),
        ({"sizes": "8,,64"}, "sizes='8,,64' must be a valid integer."),
        ({"sizes": "8,"}, "sizes='8,' must be a valid integer."),
        (
            {"size": 8},
            "size is not a parameter of this notebook: use sizes; all are dtype, rate, steps, resume, sizes.",
        ),
        ({"q": 8}, "q is not a parameter of this notebook: use dtype, rate, steps, resume, sizes."),
    ],
)
def test_one_sentence_per_fault(fault, sentence):
    with pytest.raises(ParameterError) as raised:
        parse(Config, VALUES | fault)
    assert str(raised.value) == sentence
    # What IPython, and through it papermill, prints as the last line.
    assert raised.value._render_traceback_() == [f"ParameterError: {sentence}"]


@given(sizes=st.lists(st.integers(-(10**6), 10**6), max_size=6), blanks=st.sampled_from([",", ", ", " ,"]))
def test_lists_as_text_and_as_lists_agree(sizes, blanks):
    as_text = parse(Config, VALUES | {"sizes": blanks.join(map(str, sizes))})
    assert as_text == parse(Config, VALUES | {"sizes": sizes})
    assert as_text.sizes == tuple(sizes)


def run_cells(*cells: str, extra: dict | None = None) -> dict:
    """Namespace of a kernel after ``cells``, with IPython's record of inputs."""
    namespace: dict = {"In": ["", *cells, "config = begin(Config, globals())"], **(extra or {})}
    for cell in cells:
        exec(cell, namespace)
    return namespace


def test_begin_reads_the_parameters_cell():
    assert begin(Config, run_cells(CELL)) == parse(Config, VALUES)


def test_begin_takes_what_papermill_injects():
    assert begin(Config, run_cells(CELL, "# Parameters\nsteps = 7\n")).steps == 7


def test_unknown_name_injected_by_papermill():
    with pytest.raises(ParameterError, match="size is not a parameter"):
        begin(Config, run_cells(CELL, "# Parameters\nsize = 8\n"))


def test_unknown_name_written_by_hand():
    with pytest.raises(ParameterError, match="setps is not a parameter of this notebook: use steps"):
        begin(Config, run_cells(CELL + "\nsetps: int = 5"))


def test_misspelt_name_by_hand():
    with pytest.raises(ParameterError, match=r"setps is not a parameter|steps is not set"):
        begin(Config, run_cells(CELL.replace("steps", "setps")))


def test_scratch_variables_and_earlier_mistakes_do_not_count():
    """In JupyterLab cells run in any order: only the latest parameters cell decides."""
    scratch = "import math\nx = 5\nrows = [1]"
    assert begin(Config, run_cells(CELL, scratch)).steps == 3
    assert begin(Config, run_cells(CELL + "\nsetps: int = 5", CELL, scratch)).steps == 3
    # Re-running an executed notebook: the injected cell of an earlier run stands before the parameters cell.
    assert begin(Config, run_cells("# Parameters\nsize = 8\n", CELL)).steps == 3


def test_magics_in_the_history_are_skipped():
    namespace = run_cells(CELL)
    namespace["In"].insert(1, "!ls\n%%bash\nexit 3")
    assert begin(Config, namespace).steps == 3


def test_parameters_not_run():
    with pytest.raises(ParameterError, match="dtype is not set: run the cell tagged 'parameters'"):
        begin(Config, {})


def test_begin_makes_shell_lines_strict():
    shell = SimpleNamespace(system_raise_on_error=False)
    begin(Config, run_cells(CELL, extra={"get_ipython": lambda: shell}))
    assert shell.system_raise_on_error


def test_project_root_from_anywhere(monkeypatch, tmp_path):
    root = Path(qurl.__file__).parent.parent
    for folder in (Path("/"), tmp_path, root / "tests"):
        monkeypatch.chdir(folder)
        assert project_root() == root


def test_project_root_of_an_installed_package(monkeypatch, tmp_path):
    checkout = tmp_path / "checkout"
    (checkout / "pipelines").mkdir(parents=True)
    (checkout / "pyproject.toml").write_text('[project]\nname = "qurl"\n')
    monkeypatch.setattr(qurl, "__file__", str(tmp_path / "site-packages" / "qurl" / "__init__.py"))
    monkeypatch.chdir(checkout / "pipelines")
    assert project_root() == checkout
    monkeypatch.chdir(tmp_path)
    assert project_root() == tmp_path


def test_output_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(notebook, "project_root", lambda: tmp_path)
    assert (
        output_folder("", "fig", "cpu-Qwen/Qwen2.5-7B") == tmp_path / "runs" / "fig" / "cpu-Qwen-Qwen2.5-7B"
    )
    monkeypatch.chdir("/")
    assert output_folder("new/dir") == tmp_path / "new" / "dir"
    assert output_folder(str(tmp_path / "absolute")) == tmp_path / "absolute"
    assert (tmp_path / "new" / "dir").is_dir()
    assert not list((tmp_path / "new" / "dir").iterdir())


def test_output_folder_that_cannot_be(monkeypatch, tmp_path):
    monkeypatch.setattr(notebook, "project_root", lambda: tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ParameterError, match=r"output_dir='file/x' cannot be written to \(.*\): pass a folder that can"
    ):
        output_folder("file/x")
    with pytest.raises(ParameterError, match=r"output_dir='file' is a file: pass a folder"):
        output_folder("file")


def test_provenance():
    known = notebook.provenance(preset="smoke", seed=3)
    assert list(known)[:2] == ["preset", "seed"]
    assert known["qurl"] == qurl.__version__
    assert known["python"] == ".".join(map(str, sys.version_info[:3]))
    head = subprocess.run(
        ["git", "-C", str(project_root()), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    if head:
        assert head.startswith(known["git_commit"].removesuffix("-dirty"))
    json.dumps(known)


def test_provenance_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert notebook.provenance()["git_commit"] is None


class Figure:
    """Stands for a matplotlib figure; fails when told to."""

    def __init__(self, fail: str = ""):
        self.fail = fail

    def savefig(self, path, format, **options):
        path.write_text("half")
        if format == self.fail:
            raise OSError("disk full")
        path.write_text(f"whole {format}")


TABLE = pd.DataFrame({"x": [1, 2]})


def test_results_are_complete(tmp_path):
    result = {"a": float("nan"), "b": np.float64(2.5), "c": (1, np.int64(2)), "d": Path("x"), "e": {1: True}}
    paths = notebook.save_results(tmp_path, "fig", Figure(), TABLE, result, extra=TABLE)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(paths)
    assert set(paths) == {"fig.svg", "fig.png", "fig.csv", "extra.csv", "result.json"}
    assert paths["fig.svg"].read_text() == "whole svg"
    assert json.loads(paths["result.json"].read_text()) == {
        "a": None,
        "b": 2.5,
        "c": [1, 2],
        "d": "x",
        "e": {"1": True},
    }
    pd.testing.assert_frame_equal(pd.read_csv(paths["fig.csv"]), TABLE)


def test_same_numbers_same_svg_in_every_process(tmp_path):
    """Clip paths and markers have ids; matplotlib salts them with a random number unless told otherwise."""
    program = """
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from qurl.notebook import save_results

figure = Figure()
for axes in figure.subplots(1, 2):
    axes.errorbar([0, 1], [1, 2], yerr=0.5, marker="o", capsize=3)
    axes.imshow([[0, 1], [1, 0]])
save_results(Path(sys.argv[1]), "fig", figure, pd.DataFrame(), {})
"""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        subprocess.run([sys.executable, "-c", program, str(tmp_path / name)], check=True)
    first, second = ((tmp_path / name / "fig.svg").read_bytes() for name in ("first", "second"))
    assert b"clip-path" in first and b"<dc:date>" not in first
    assert first == second


def test_a_failed_save_leaves_the_old_files(tmp_path):
    notebook.save_results(tmp_path, "fig", Figure(), TABLE, {"run": 1})
    with pytest.raises(OSError, match="disk full"):
        notebook.save_results(tmp_path, "fig", Figure(fail="png"), TABLE, {"run": 2})
    assert (tmp_path / "fig.png").read_text() == "whole png"
    assert json.loads((tmp_path / "result.json").read_text()) == {"run": 1}
    assert not list(tmp_path.glob("*.partial"))
