"""Documentation that repeats what the code says."""

import dataclasses
import re

import pandas as pd
import pytest

from qurl.config import QuRLConfig
from qurl.diagnostics import METRICS


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
