"""What the README points to is there."""

import re


def test_links_and_paths_exist_and_nothing_is_left_to_fill_in(root):
    text = (root / "README.md").read_text()
    links = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    assert links
    assert [target for target in links if not (root / target).exists()] == []
    mentioned = re.findall(r"(?:pipelines|notebooks|docs|benchmarks|requirements)/[\w./-]+\.\w+", text)
    assert [path for path in mentioned if not (root / path).exists()] == []
    assert re.findall(r"@[A-Z]+@", text) == []
