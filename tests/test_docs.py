"""Documentation that repeats what the code says."""

from qurl.diagnostics import METRICS


def test_every_metric_is_in_the_table(root):
    text = (root / "docs" / "training.md").read_text()
    for name, meaning in METRICS.items():
        assert f"| `{name}` | {meaning} |" in text
