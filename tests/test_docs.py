"""Documentation that repeats what the code says."""

import dataclasses

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
