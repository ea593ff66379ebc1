"""The final policies of finished runs, judged by more samples: how much of an interval over seeds is the evaluation's.

    python -m benchmarks.judge_again --figures tab_dapo,tab_deepscaler --k 16 --output data/results/judge_again/cpu

A run samples once from each of its 1,000 held-out sums, which leaves a difference of two runs a standard error of 1.3
to 1.8 points. Here each final policy draws ``k`` samples of the same sums, and the claims on accuracy are judged anew.
Writes accuracy.csv and result.json. Evaluations are kept in the runs' folders, so that a stopped command goes on.
"""

import argparse
import json
from pathlib import Path

import pandas as pd
from safetensors.torch import load_file

from qurl.evaluation import evaluate
from qurl.experiments import RunStore
from qurl.experiments.figures import CLAIMS
from qurl.experiments.matrix import FIGURES, arms
from qurl.experiments.results import judge, scores
from qurl.files import write_whole
from qurl.notebook import print_claims, provenance
from qurl.rollout import RolloutEngine
from qurl.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--figures", required=True, type=lambda text: text.replace(" ", "").split(","), help="by name"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of each arm (default: %(default)s)")
    parser.add_argument("--k", type=int, default=16, help="samples of each problem (default: %(default)s)")
    parser.add_argument("--runs-dir", default="", help="the run store (default: runs)")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    options = parser.parse_args()
    tables = [figure for figure in FIGURES if figure != "fig_convergence"]  # which is about rewards
    if unknown := set(options.figures) - set(tables):
        parser.error(f"--figures {unknown.pop()} is not possible: use some of {', '.join(tables)}.")
    figures = list(dict.fromkeys(options.figures))
    for name, value in (("seeds", options.seeds), ("k", options.k)):
        if value < 1:
            parser.error(f"--{name} {value} is not possible: use a whole number from 1 on.")
    options.output.mkdir(parents=True, exist_ok=True)
    store = RunStore(options.runs_dir)
    wanted = [
        (figure, arm, arm.run("cpu", seed))
        for figure in figures
        for arm in arms(figure, "cpu")
        for seed in range(options.seeds)
    ]
    rows = []
    with RolloutEngine("tiny", "bf16", max_model_len=32, max_num_seqs=256) as engine:
        for figure, arm, spec in wanted:
            run, folder = store.load(spec), store.folder(spec)
            engine.sync(load_file(folder / "policy" / "model.safetensors").items())
            asked = run.result["run"]
            judged = evaluate(
                engine,
                load_task(asked["task"], "test", **asked["task_options"]),
                options.k,
                max_tokens=asked["max_completion_length"],
                temperature=asked["eval_temperature"],
                output=folder / f"samples-{options.k}",
                report=lambda line: None,
            )
            after = 100 * judged.samples["correct"].mean()
            about = {"figure": figure, "experiment": spec.experiment, "arm": arm.key, "label": arm.label}
            once = 100 * run.result["accuracy"]["after"]["mean"]
            rows.append(about | {"seed": spec.seed, "after_1": once, "after": after})
            print(
                f"{spec.experiment}/{spec.name}: {once:.1f} % of 1 sample, {after:.2f} % of {options.k}",
                flush=True,
            )
        hardware = engine.description["hardware"]
    table = pd.DataFrame(rows)
    claims = []
    for figure in figures:
        runs = table[table["figure"] == figure]
        print(scores(runs)[["label", "mean", "low", "high"]].round(2).to_string(index=False))
        claims += [
            judge(runs, claim._replace(text=f"{figure}: {claim.text}"), "cpu")
            for _, claim in CLAIMS[figure]
            if claim.measure == "after"
        ]
    print_claims(claims)
    write_whole(options.output / "accuracy.csv", table.round(3).to_csv(index=False))
    result = provenance(k=options.k, seeds=options.seeds, hardware=hardware)
    result |= {"claims": claims, "runs": table.to_dict("records")}
    write_whole(options.output / "result.json", json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
