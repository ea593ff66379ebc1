"""Finished runs of ``qurl train`` side by side: a table of accuracies, curves, a figure.

    python -m benchmarks.training_runs runs/train/tiny-* --output data/results/training_tiny

A run is labelled by its folder's name without a last ``-seed<N>``; runs of one label are seeds of the same thing. The
seed itself is that of the run's result, whatever the folder says. Writes training.svg, .png and .csv (smoothed curves),
accuracy.csv, and result.json with every run's parameters and provenance.
"""

import argparse
import json
import re
from pathlib import Path

import pandas as pd

from qurl import plots
from qurl.notebook import provenance, save_results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="of finished runs")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--title", default="", help="of the figure")
    options = parser.parse_args()

    results, accuracies, curves = {}, [], []
    for folder in options.folders:
        if not (folder / "result.json").is_file():
            parser.error(f"{folder} holds no finished run: give it to qurl train --output_dir first.")
        result = json.loads((folder / "result.json").read_text())
        results[folder.name] = result
        name = re.sub(r"-seed\d+$", "", folder.name)
        row = {
            "run": name,
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
        table = plots.windowed(metrics.set_index("step"), ["reward", "mismatch/kl_k3"])
        curves.append(table.assign(arm=name, seed=row["seed"]))
    accuracy, curves = (
        pd.DataFrame(accuracies).sort_values(["run", "seed"]),
        pd.concat(curves, ignore_index=True),
    )
    print(accuracy.to_string(index=False, float_format="{:.3f}".format))
    options.output.mkdir(parents=True, exist_ok=True)
    figure = plots.curves(curves, title=options.title)
    result = {"runs": results, **provenance()}
    curves = curves[["arm", "seed", "step", "reward", "mismatch/kl_k3"]].round(5)
    save_results(options.output, "training", figure, curves, result, accuracy=accuracy.round(4))


if __name__ == "__main__":
    main()
