"""The shipped notebooks: their form, and what happens when papermill runs them (cases N01, N03, N04)."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import papermill
import pytest

from qurl import notebook
from qurl.benchmark import PRESETS, QuickstartConfig, SpeedupConfig
from qurl.experiments import RunSpec, TrainConfig
from qurl.experiments.figures import FigureConfig, record
from qurl.experiments.matrix import FIGURES
from qurl.experiments.results import Results
from qurl.experiments.weight_update import WeightUpdateConfig
from qurl.exploration import codes, gradients, training, uaq_step

# Beside other jobs a notebook takes many times as long.
pytestmark = pytest.mark.timeout(900)

ROOT = notebook.project_root()
CONFIGS = {
    "pipelines/fig_speedup.ipynb": SpeedupConfig,
    "pipelines/fig_weight_update.ipynb": WeightUpdateConfig,
    "pipelines/train.ipynb": TrainConfig,
    "notebooks/00_quickstart.ipynb": QuickstartConfig,
    "notebooks/10_quantization.ipynb": codes.QuantizationConfig,
    "notebooks/20_objectives.ipynb": gradients.ObjectivesConfig,
    "notebooks/30_uaq.ipynb": uaq_step.UaqConfig,
    "notebooks/40_train.ipynb": training.LiveTrainConfig,
    "notebooks/50_compare_runs.ipynb": training.CompareConfig,
    "notebooks/90_your_own_task.ipynb": training.OwnTaskConfig,
    **{f"pipelines/{figure}.ipynb": FigureConfig for figure in FIGURES},
}
SHIPPED = sorted(
    str(path.relative_to(ROOT))
    for folder in ("pipelines", "notebooks")
    for path in (ROOT / folder).glob("*.ipynb")
)
FIG_SPEEDUP = ROOT / "pipelines" / "fig_speedup.ipynb"
FILES = {
    "fig_speedup.svg",
    "fig_speedup.png",
    "fig_speedup.csv",
    "fig_speedup_gpus.csv",
    "measurements.csv",
    "result.json",
}


def run_papermill(*arguments: str | Path, cwd: Path | None = None, kernel: str | None = "python3"):
    command = [sys.executable, "-m", "papermill", *map(str, arguments), "--no-progress-bar", "--log-output"]
    command += ["-k", kernel] if kernel else []
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def options(**parameters) -> list[str]:
    """``-p name value`` for each."""
    return [word for name, value in parameters.items() for word in ("-p", name, str(value))]


def last_line(done: subprocess.CompletedProcess) -> str:
    return done.stderr.strip().splitlines()[-1]


def write(path: Path, *sources: str, kernelspec: dict | None = None, outputs: list | None = None) -> Path:
    """A notebook of code cells; the first one is the shipped parameters cell where it is None."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if outputs:
        cells[0].outputs = outputs
    metadata = {"kernelspec": kernelspec} if kernelspec else {}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
    return path


# Form ------------------------------------------------------------------------------------------------------------


def test_all_notebooks_are_known():
    assert set(CONFIGS) <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_form(name):
    text = (ROOT / name).read_text()
    shipped = nbformat.reads(text, as_version=4)
    nbformat.validate(shipped)
    assert shipped.metadata.kernelspec == {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    assert shipped.metadata.language_info.name == "python"
    code = [cell for cell in shipped.cells if cell.cell_type == "code"]
    assert len(code) <= 15
    assert shipped.cells[0].cell_type == "markdown"
    assert code[0].metadata.tags == ["parameters"]
    assert "begin(" in code[1].source
    for cell in code:
        assert cell.outputs == [] and cell.execution_count is None
        # Nothing but tags: no times of execution, no editor's state.
        assert set(cell.metadata) <= {"tags"}
    # No absolute path and no home folder, in metadata or source.
    assert not re.search(r"(?<![\w.:/])/(home|root|work|tmp|opt|usr|Users|mnt)/|[A-Z]:\\\\", text)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_cell(name):
    """Literals, one per line, that papermill's parser understands: the typed config's names, valid as they stand."""
    source = next(cell.source for cell in nbformat.read(ROOT / name, 4).cells if cell.cell_type == "code")
    values = {}
    for line in source.splitlines():
        (statement,) = ast.parse(line).body
        assert isinstance(statement, ast.AnnAssign) and isinstance(statement.annotation, ast.Name), line
        assert line.count("=") - line.split("#")[-1].count("=") == 1, line
        assert "  # " in line, f"{line!r} says neither unit nor allowed values"
        values[statement.target.id] = ast.literal_eval(statement.value)
    assert list(values) == list(CONFIGS[name].model_fields)
    notebook.parse(CONFIGS[name], values)
    # papermill sees each of them, with its help text.
    inferred = papermill.inspect_notebook(str(ROOT / name))
    assert list(inferred) == list(values)
    assert all(parameter["help"] for parameter in inferred.values())


# Parameters, through papermill -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-p", "dtype", "fp4"], "dtype='fp4' must be 'int8' or 'fp8': pass e.g. -p dtype int8."),
        (
            ["-p", "batch_size", "8"],
            "batch_size is not a parameter of this notebook: use batch_sizes; all are ",
        ),
        (
            ["-p", "max_tokens", "-5"],
            "max_tokens=-5 must hold whole numbers of 2 or more: pass e.g. -p max_tokens 64.",
        ),
        (["-p", "repeats", "abc"], "repeats='abc' must be a valid integer: pass e.g. -p repeats 3."),
        (
            ["-y", "batch_sizes: [8, 0]"],
            "batch_sizes=[8, 0] must hold whole numbers from 1 to 4096: pass e.g. ",
        ),
        (
            ["-p", "batch_sizes", "8,,64"],
            "batch_sizes='8,,64' must be a valid integer: pass e.g. -p batch_sizes 8,64.",
        ),
        (["-p", "batch_sizes", "5000"], "batch_sizes=5000 must hold whole numbers from 1 to 4096"),
    ],
)
def test_bad_parameter_stops_at_once(tmp_path, arguments, sentence):
    output = tmp_path / "out.ipynb"
    done = run_papermill(FIG_SPEEDUP, output, *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert last_line(done).startswith(f"ParameterError: {sentence}")
    # Before anything slow: the cell that measures never ran, and nothing was written.
    executed = [
        cell for cell in nbformat.read(output, 4).cells if cell.cell_type == "code" and cell.execution_count
    ]
    assert "measure_rollout(**" not in "".join(cell.source for cell in executed)
    assert [path.name for path in tmp_path.iterdir()] == ["out.ipynb"]


# Kernels (N01) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernelspec", [None, {"name": "my-env", "display_name": "my env"}])
def test_runner_names_the_kernel(tmp_path, kernelspec):
    source = write(tmp_path / "in.ipynb", "print('ran')", kernelspec=kernelspec)
    output = notebook.run(source, tmp_path / "out.ipynb")
    assert nbformat.read(output, 4).cells[0].outputs[0].text == "ran\n"


@pytest.mark.parametrize(
    ("kernelspec", "kernel", "line"),
    [
        (
            {"name": "my-env", "display_name": "my env", "language": "python"},
            None,
            "No such kernel named my-env",
        ),
        (None, "my-env", "No such kernel named my-env"),
        (None, None, "No kernel name found in notebook and no override provided."),
    ],
)
def test_missing_kernel_is_one_clear_line(tmp_path, kernelspec, kernel, line):
    source = write(tmp_path / "in.ipynb", "1", kernelspec=kernelspec)
    done = run_papermill(
        source,
        tmp_path / "out.ipynb",
        *(["-l", "python"] if kernelspec is None and kernel else []),
        kernel=kernel,
    )
    assert done.returncode != 0
    assert last_line(done).endswith(line)


# Output folders (N03) ----------------------------------------------------------------------------------------------


def test_runner_makes_the_folder_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "in.ipynb", "from pathlib import Path\nassert Path('new/dir').is_dir()")
    assert notebook.run(source, "new/dir/out.ipynb") == tmp_path / "new" / "dir" / "out.ipynb"
    assert (tmp_path / "new" / "dir" / "out.ipynb").is_file()


def test_papermill_alone_fails_before_it_runs_anything(tmp_path):
    """papermill does not make folders; it must say so at the start and not at the end."""
    source = write(tmp_path / "in.ipynb", "open('ran', 'w')")
    done = run_papermill(source, tmp_path / "new" / "out.ipynb", cwd=tmp_path)
    assert done.returncode != 0
    assert "output folder" in last_line(done) and "doesn't exist" in last_line(done)
    assert not (tmp_path / "ran").exists()


# Failing cells (N04) -----------------------------------------------------------------------------------------------

STRICT = "from qurl.notebook import Parameters, begin\nclass None_(Parameters): pass\nbegin(None_, globals())"


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("1/0", "ZeroDivisionError"),
        ("!exit 3", "CalledProcessError"),
        ("listing = !exit 3", "CalledProcessError"),
        ("%%bash\nexit 3", "CalledProcessError"),
    ],
)
def test_failing_cell(tmp_path, cell, error):
    source = write(tmp_path / "in.ipynb", STRICT, cell, "open('ran', 'w')")
    output = tmp_path / "out.ipynb"
    done = run_papermill(source, output, "-l", "python", cwd=tmp_path)
    assert done.returncode != 0
    assert not (tmp_path / "ran").exists()
    # The cell is named, on the terminal and in the saved notebook, which holds the error and what came before.
    assert 'Exception encountered at "In [2]"' in done.stderr
    assert error in last_line(done)
    saved = nbformat.read(output, 4).cells
    failed = next(
        cell for cell in saved if any(out.output_type == "error" for out in cell.get("outputs", []))
    )
    assert failed.outputs[-1].ename == error
    assert any("papermill-error-cell" in item for item in map(json.dumps, saved))


def test_shell_lines_that_succeed_still_work(tmp_path):
    source = write(
        tmp_path / "in.ipynb",
        STRICT,
        "word = 'two words'\n!echo {word}",
        "x = !echo {word}\nassert x == [word]",
    )
    saved = nbformat.read(notebook.run(source, tmp_path / "out.ipynb"), 4)
    assert saved.cells[1].outputs[0].text.strip() == "two words"


def test_stored_errors_do_not_matter(tmp_path):
    old = nbformat.v4.new_output("error", ename="ValueError", evalue="old", traceback=["old"])
    source = write(tmp_path / "in.ipynb", "print('new')", outputs=[old])
    for arguments in ([], ["--prepare-only"]):
        done = run_papermill(source, tmp_path / "out.ipynb", "-l", "python", *arguments)
        assert done.returncode == 0, done.stderr


def test_record_of_a_figure():
    """Claims are judged on the runs of their own experiment, under the same seed."""
    runs = [
        {
            "experiment": experiment,
            "arm": arm,
            "seed": seed,
            "after": after + seed,
            "reward_last": 0.01 * after,
        }
        for experiment, arm, after in (
            ("gsm8k", "bf16", 60),
            ("gsm8k", "int8-naive", 50),
            ("dapo", "bf16", 0),
        )
        for seed in (0, 1, 2)
    ]
    missing = [RunSpec(experiment="gsm8k", preset="cpu", objective="tis")]
    config = FigureConfig(preset="cpu", seeds=3, run_missing=False, runs_dir="", output_dir="")
    told = record("tab_gsm8k", config, Results(pd.DataFrame(runs), pd.DataFrame(), missing), start=26.6)
    assert told["preset"] == "cpu" and told["seeds"] == 3 and told["git_commit"]
    assert list(told)[-4:] == ["claims", "start", "runs", "missing"] and told["start"] == 26.6
    assert told["runs"] == runs and told["missing"] == [missing[0].name]
    verdicts = {claim["claim"]: claim for claim in told["claims"]}
    assert len(verdicts) == 7
    naive = verdicts["INT8, naive: below BF16"]
    assert (naive["verdict"], naive["difference"], naive["seeds"]) == ("reproduced", 10, 3)
    assert verdicts["INT8: TIS is better than naive"]["reason"] == "no finished run of int8-tis"


# Whole runs --------------------------------------------------------------------------------------------------------


def check_speedup_folder(folder: Path, dtype: str) -> dict:
    assert {path.name for path in folder.iterdir()} == FILES
    result = json.loads((folder / "result.json").read_text())
    assert result["parameters"]["preset"] == "smoke" and result["parameters"]["seed"] == 0
    assert set(result["engines"]) >= {"bf16", dtype}
    for engine in result["engines"].values():
        assert engine["parameters"] > 1e6 and engine["hardware"]
        assert any(name.startswith("vllm") for name in engine["versions"])
    assert {claim["verdict"] for claim in result["claims"]} == {"not testable with this preset"}
    return result


def test_fig_speedup_runs(tmp_path):
    """From a foreign folder, text and numbers as parameters; the figure, its numbers and a verdict come out."""
    pytest.importorskip("vllm")
    folder = tmp_path / "results"
    done = run_papermill(
        FIG_SPEEDUP,
        tmp_path / "out.ipynb",
        *options(preset="smoke", batch_sizes="2,4", max_tokens=8, output_dir=folder),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = check_speedup_folder(folder, "int8")
    assert result["sizes"] == {
        "model": "tiny",
        "batch_sizes": [2, 4],
        "max_tokens": [8],
        "repeats": PRESETS["smoke"]["repeats"],
    }
    # Progress as log lines, then the verdict beside the paper's numbers.
    log = done.stdout + done.stderr
    assert re.search(r"\[1/\d+\] [\w-]+, batch 2, 8 tokens: sync \d", log)
    assert "paper: 1.2 to 1.8 times BF16" in log
    # A verdict for each batch size.
    for batch_size in (2, 4):
        assert re.search(
            rf"batch {batch_size}, 8 tokens: quantization alone: .* not testable with this preset", log
        )
    outputs = "".join(
        json.dumps(cell.get("outputs", "")) for cell in nbformat.read(tmp_path / "out.ipynb", 4).cells
    )
    assert "image/png" in outputs
    # The engines' start-up noise stays out of the notebook.
    assert "WARNING" not in outputs and "INFO" not in outputs


@pytest.mark.slow
def test_fig_speedup_from_anywhere(tmp_path):
    """Case N03: the root, /, and a new output folder give the same files, wherever the executed notebook goes."""
    pytest.importorskip("vllm")
    sizes = []
    for index, cwd in enumerate((ROOT, Path("/"), tmp_path)):
        folder = tmp_path / f"results{index}"
        output = tmp_path / "new" / str(index) / "out.ipynb"
        output.parent.mkdir(parents=True)
        done = run_papermill(
            FIG_SPEEDUP,
            output,
            "-y",
            "{preset: smoke, dtype: fp8, batch_sizes: [2], max_tokens: 4}",
            *options(output_dir=folder),
            cwd=cwd,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        check_speedup_folder(folder, "fp8")
        sizes.append({path.name: path.read_bytes() for path in folder.glob("fig_speedup_gpus.csv")})
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize(
    "parameters",
    [
        {"model": "tiny", "max_tokens": 8},
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_quickstart_runs(tmp_path, parameters):
    pytest.importorskip("vllm")
    output = notebook.run(ROOT / "notebooks" / "00_quickstart.ipynb", tmp_path / "out.ipynb", parameters)
    outputs = [out for cell in nbformat.read(output, 4).cells for out in cell.get("outputs", [])]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 2
    text = "".join(out.get("text", "") for out in outputs)
    assert "--- bf16, greedy" in text and "--- int8, greedy" in text
    # The mismatch is there and is small: an engine that served wrong weights would be far off (nats).
    assert 0 < float(re.search(r"mean \|Δlogp\| ([\d.]+)", text)[1]) < 0.5
    kl, error = map(float, re.search(r"k3: ([\d.]+) ± ([\d.]+) nats per token", text).groups())
    assert 0 < kl < 0.2 and 0 < error < kl
