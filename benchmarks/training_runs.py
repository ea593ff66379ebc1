"""Finished runs of ``qurl train`` side by side: a table of accuracies, curves, a figure.

    python -m benchmarks.training_runs runs/train/tiny-* --output data/results/training_tiny
    python -m benchmarks.training_runs --output data/results/training_tiny    # the figure anew, from what lies there

A run's arm is its folder's name without a last ``-seed<N>``; runs of one arm are seeds of the same thing. The seed
itself is that of the run's result, whatever the folder says. The figure calls an arm by the dtype and objective in its
runs' results, and has a row of panels for the arms of as many steps and the same seeds. Writes training.svg, .png and
.csv (smoothed curves), accuracy.csv, and result.json with every run's parameters and provenance.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import pandas as pd

from qurl import QuRLConfig, plots
from qurl.notebook import provenance, save_results

_NAMES = {"tis": "TIS", "acr": "ACR"}
_METRICS = ["reward", "mismatch/kl_k3"]


def arm(folder: str) -> str:
    """A run's folder without its seed."""
    return re.sub(r"-seed\d+$", "", folder)


def read(folders: list[Path]) -> tuple[dict[str, dict], pd.DataFrame, pd.DataFrame]:
    """Results by folder, accuracies, and smoothed curves of finished runs."""
    results, accuracies, curves = {}, [], []
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        results[folder.name] = result
        row = {
            "run": arm(folder.name),
            "seed": result["seed"],
            "steps": result["steps"],
            "seconds": round(result["seconds"]),
        }
        for key in ("before", "after", "gain"):
            score = result["accuracy"][key]
            row |= {
                key: score["mean"],
                f"{key}_low": score["interval"][0],
                f"{key}_high": score["interval"][1],
            }
        accuracies.append(row)
        metrics = pd.read_csv(folder / "metrics.csv").dropna(subset="reward")
        table = plots.windowed(metrics.set_index("step"), _METRICS)
        curves.append(table.assign(arm=row["run"], seed=row["seed"]))
    curves = pd.concat(curves, ignore_index=True)[["arm", "seed", "step", *_METRICS]].round(5)
    return results, pd.DataFrame(accuracies).sort_values(["run", "seed"]).round(4), curves


def labels(results: dict[str, dict]) -> dict[str, str]:
    """What the figure calls each arm: dtype and objective, with the folder's name where that says two arms alike."""
    names = {}
    for folder, result in results.items():
        engine = result["engine"]
        # A result names only what its command set.
        objective = result["run"].get("objective", QuRLConfig.objective)
        bits = f" {engine['code_bits']}-bit codes" if engine["code_bits"] != 8 else ""
        names[arm(folder)] = f"{engine['dtype'].upper()}{bits}, {_NAMES.get(objective, objective)}"
    several = Counter(names.values())
    return {key: name if several[name] == 1 else f"{name} ({key})" for key, name in names.items()}


def draw(results: dict[str, dict], accuracy: pd.DataFrame, curves: pd.DataFrame, title: str = ""):
    """The figure: a row of panels for the arms of as many steps and the same seeds."""
    rows = {
        name: f"{runs['steps'].max():,} steps, seed{'s' * (len(runs) > 1)} {', '.join(map(str, runs['seed']))}"
        for name, runs in accuracy.groupby("run")
    }
    table = curves.assign(row=curves["arm"].map(rows), arm=curves["arm"].map(labels(results)))
    return plots.curves(table, _METRICS, title=title)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", type=Path, nargs="*", help="of finished runs; none: those of --output, as written there"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--title", default="", help="of the figure")
    options = parser.parse_args()

    for folder in options.folders or [options.output]:
        if not (folder / "result.json").is_file():
            parser.error(f"{folder} holds no finished run: give it to qurl train --output_dir first.")
    if options.folders:
        results, accuracy, curves = read(options.folders)
    else:
        results = json.loads((options.output / "result.json").read_text())["runs"]
        accuracy, curves = (pd.read_csv(options.output / f"{name}.csv") for name in ("accuracy", "training"))
    print(accuracy.to_string(index=False, float_format="{:.3f}".format))
    options.output.mkdir(parents=True, exist_ok=True)
    figure = draw(results, accuracy, curves, options.title)
    save_results(
        options.output, "training", figure, curves, {"runs": results, **provenance()}, accuracy=accuracy
    )


if __name__ == "__main__":
    main()
