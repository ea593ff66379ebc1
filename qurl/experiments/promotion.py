"""Small results of figures and tables in the repository, ``data/results``, and the page of all their verdicts."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from qurl.files import whole_file
from qurl.notebook import project_root

_PROMOTED = (".svg", ".png", ".csv", ".json")
# A question of ours has an answer instead.
_VERDICTS = ("reproduced", "not reproduced", "undecided", "not testable with this preset")
_COLUMNS = (*_VERDICTS, "a question of ours")
_RULES = """\
Written by `qurl reproduce` from the `result.json` files below, which hold seeds, commits and hardware.

Two arms are compared by their difference under the same seed, with its 95 % interval over seeds (Student's t).
**Reproduced**: the whole interval is on the claim's side; **not reproduced**: on the other side; **undecided**: it
holds both. Speed-ups and weight updates come from one measurement each; their reasons give the rule. A question of ours
is one that the paper does not ask. Where `judge_again` judges a claim too, by 16 samples of each problem instead of
one, its verdict is the one to go by. Training runs at `cpu` are of the embedded 1.8M-parameter `tiny` on three-digit
sums; **stress setting**: 4-bit codes in the INT8 kernels of DAPO's and DeepScaleR's runs, since 8-bit codes hardly
disturb so small a model; GSM8K's runs have 8 bits.
"""


def results_root() -> Path:
    """Where small results are kept in the repository."""
    return project_root() / "data" / "results"


def promote_results(folder: Path, target: Path, report: Callable[[str], None]) -> None:
    """Copy pictures and tables, each whole or not at all; what shows fewer runs does not replace what shows more."""
    new, old = (_result(place / "result.json", report) for place in (folder, target))
    if new is None or old is None:
        return
    if new.get("missing"):
        report(f"  {target} is left as it is: {len(new['missing'])} runs of this figure are not finished")
        return
    if new.get("seeds", 0) < old.get("seeds", 0):
        report(f"  {target} is left as it is: it has {old['seeds']} seeds, this figure {new['seeds']}")
        return
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.iterdir()):
        if file.suffix in _PROMOTED:
            with whole_file(target / file.name) as partial:
                shutil.copyfile(file, partial)


def _result(file: Path, report: Callable[[str], None]) -> dict | None:
    """A figure's result; {} if there is none, None after a report if it is damaged."""
    try:
        result = json.loads(file.read_text()) if file.is_file() else {}
        claims = result.get("claims") or []
        seeds = result.get("seeds", 0)
        if isinstance(seeds, int) and all(
            {"claim", "paper", "ours", "verdict", "reason"} <= set(c) for c in claims
        ):
            return result
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    report(f"  {file} is damaged and left out: restore or delete it")
    return None


def claims_page(root: Path, report: Callable[[str], None] = print) -> str:
    """All verdicts below a folder of results as a Markdown page: how many of each, then every claim by pipeline."""
    counts, sections = [], []
    for file in sorted(root.glob("*/*/result.json")):
        result = _result(file, report) or {}
        if not (claims := result.get("claims")):
            continue
        place = file.parent.relative_to(root)
        verdicts = Counter(
            claim["verdict"] if claim["verdict"] in _VERDICTS else "a question of ours" for claim in claims
        )
        stress = ", stress setting" if _stressed(result) else ""
        counts.append(
            f"| [{place}]({place}){stress} | " + " | ".join(str(verdicts[name]) for name in _COLUMNS) + " |"
        )
        sections += ["", f"## [{place}]({place}){stress}", "", *_arms(result.get("runs", []))]
        sections += ["| claim | paper | here | verdict |", "|---|---|---|---|", *map(_row, claims)]
    header = f"| | {' | '.join(_COLUMNS)} |"
    lines = [
        "# The paper's claims, and what came out here",
        "",
        _RULES,
        header,
        "|---" * (len(_COLUMNS) + 1) + "|",
    ]
    return "\n".join([*lines, *counts, *sections]) + "\n"


def _row(claim: dict) -> str:
    setting = f" (batch {claim['batch_size']}, {claim['max_tokens']} tokens)" if "batch_size" in claim else ""
    verdict = f"**{claim['verdict']}**: {claim['reason']}"
    return f"| {claim['claim']}{setting} | {claim['paper']} | {claim['ours'] or '–'} | {verdict} |"


def _stressed(result: dict) -> bool:
    return any("-bit codes" in run["label"] for run in result.get("runs", []))


def _arms(runs: list[dict]) -> list[str]:
    """Lines that say what the names of arms mean, for each experiment of a figure's runs."""
    labels: dict[str, dict[str, str]] = {}
    for run in runs:
        labels.setdefault(run["experiment"], {})[run["arm"]] = run["label"]
    lines = [
        f"{experiment}: " + "; ".join(f"`{arm}` is {label}" for arm, label in arms.items()) + "."
        for experiment, arms in labels.items()
    ]
    return [text for line in lines for text in (line, "")]
