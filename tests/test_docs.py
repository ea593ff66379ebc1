"""Documentation that repeats what the code says, and its snippets: scripts run, commands are possible."""

import dataclasses
import itertools
import re
import shlex
import subprocess
import sys

import nbformat
import pandas as pd
import papermill
import pytest

from qurl.cli import build_parser
from qurl.config import QuRLConfig
from qurl.diagnostics import METRICS
from qurl.notebook import project_root
from qurl.training import _parse

ROOT = project_root()
PAGES = [
    *(ROOT / "README.md", *ROOT.glob("docs/*.md")),
    *(*ROOT.glob("data/**/README.md"), *ROOT.glob("benchmarks/*.md")),
    *(*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("pipelines/*.ipynb")),
]


def prose(page) -> str:
    if page.suffix == ".md":
        return page.read_text()
    cells = nbformat.read(page, 4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def fences(page) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", prose(page), re.M | re.S)


def scripts() -> list:
    """Every script of a page, and both sides of a diff."""
    found = []
    for page in PAGES:
        texts = []
        for language, text in fences(page):
            if language == "python":
                texts.append(text)
            if language == "diff":
                lines = text.splitlines(keepends=True)
                texts += ["".join(line[1:] for line in lines if line[0] != left_out) for left_out in "+-"]
        name = page.relative_to(ROOT)
        found += [pytest.param(text, id=f"{name}-{number}") for number, text in enumerate(texts)]
    return found


def commands() -> list:
    """Every line that is a command, as its words, a continued one as one."""
    found = []
    for page in PAGES:
        text = prose(page).replace("\\\n", " ")
        for line in re.findall(
            r"^ *((?:qurl|papermill|python -m|accelerate launch|torchrun) .*)$", text, re.M
        ):
            # "…" stands for further options, DTYPE for each in turn.
            words = shlex.split(line.replace("…", "").replace("DTYPE", "int8"), comments=True)
            found.append(pytest.param(words, id=f"{page.relative_to(ROOT)}: {' '.join(words)[:60]}"))
    return found


def test_every_fenced_block_is_of_a_kind_that_is_tested():
    assert {language for page in PAGES for language, _ in fences(page)} == {"python", "diff", "bash"}


# An engine and a few steps; beside other jobs a step takes many times as long.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", scripts())
def test_script_runs_as_it_stands(script, tmp_path):
    """In a process and a folder of its own; but for two steps of training where it takes more."""
    script = re.sub(r"\bmax_steps=\d+", "max_steps=2", script)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("words", commands())
def test_command_is_possible(words):
    """Its options exist and, of ``qurl``, go together."""
    if "qurl.cli" in words:
        words = ["qurl", *words[words.index("qurl.cli") + 1 :]]
    if words[:2] == ["qurl", "train"]:
        _parse(words[2:])
    elif words[0] == "qurl":
        build_parser().parse_args(words[1:])
    elif words[0] == "papermill":
        (notebook,) = [word for word in words if word.startswith(("pipelines/", "notebooks/"))]
        given = {name for flag, name in itertools.pairwise(words) if flag == "-p"}
        assert given <= papermill.inspect_notebook(ROOT / notebook).keys()
    else:
        assert words[:2] == ["python", "-m"]
        module = ROOT / f"{words[2].replace('.', '/')}.py"
        known = module.read_text() + (ROOT / "benchmarks" / "command.py").read_text()
        assert [flag for flag in words if flag.startswith("--") and f'"{flag}"' not in known] == []


def test_every_metric_is_in_the_table(root):
    text = (root / "docs" / "training.md").read_text()
    for name, meaning in METRICS.items():
        assert f"| `{name}` | {meaning} |" in text


def test_every_field_beyond_trls_is_in_the_table_with_its_default(root):
    text = (root / "docs" / "training.md").read_text()
    for field in dataclasses.fields(QuRLConfig):
        if field.name in QuRLConfig.__annotations__:
            assert f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} |" in text


@pytest.mark.parametrize("table", ["tab_dapo", "tab_deepscaler", "tab_gsm8k", "tab_uaq_ablation"])
def test_results_page_has_the_numbers_of_its_tables(root, table):
    """Each row of docs/results.md, in the order of the table it comes from."""
    (section,) = re.findall(
        rf"\n## [^\n]*`{table}`\n(.*?)(?=\n## |\Z)", (root / "docs" / "results.md").read_text(), re.S
    )
    shown = [line for line in section.splitlines() if line.startswith(("| BF16", "| INT8", "| FP8"))]
    rows = pd.read_csv(root / "data" / "results" / table / "cpu" / f"{table}.csv")
    assert len(shown) == len(rows)
    for line, row in zip(shown, rows.itertuples(), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:2] == [row.label, f"{row.mean:.1f} ({row.low:.1f}–{row.high:.1f})"]
        assert ("–" if pd.isna(row.paper) else f"{row.paper:g}") in cells[2:]


def test_committed_results_name_no_folder_of_a_machine(root):
    files = [file for kind in ("json", "csv", "md") for file in root.glob(f"data/results/**/*.{kind}")]
    assert len(files) > 50
    assert [
        str(file) for file in files if re.search(r"[\"'\s(](/root|/home|/tmp|/work)/", file.read_text())
    ] == []
