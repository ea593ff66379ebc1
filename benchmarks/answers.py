"""Answers checked per second, with a bare call of math-verify beside it, on the same pairs.

    python -m benchmarks.answers
    python -m benchmarks.answers --data MATH.json --output answers.json

A pair is a completion ending in a box and a gold. Half of the answers are right and spelled differently from the
gold, half are the gold of another row. Without ``--data`` (a JSON list of rows with an ``answer``) the golds are
those of a typical mix, two thirds plain numbers. Both run on all cores: `check_many` with its workers, math-verify
in as many processes, without timeouts. Requirement: 500 answers per second on two cores.
"""

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from qurl.answers import check_many
from qurl.answers.workers import POOL_SIZE

TYPICAL = [
    r"\frac{3\sqrt{3}}{4}", r"6 - 5i", r"(3,4]", r"\left( 3, \frac{\pi}{2} \right)", r"x^3+3x-6", r"1 \pm \sqrt{19}",
    r"\text{Evelyn}", r"90^\circ", r"\frac{14}{3}", r"y = 2x + 3", r"\$18.90", r"3, 5, 7", r"11\sqrt2", r"2k+2",
    r"\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix}", r"(-\infty, 2) \cup (3, \infty)",
]  # fmt: skip


def golds_of(path: str | None, count: int, generator: random.Random) -> list[str]:
    if path is None:
        formulas = [generator.choice(TYPICAL) for _ in range(count // 3)]
        return formulas + [str(generator.randint(-9, 999)) for _ in range(count - len(formulas))]
    golds = [str(row["answer"]) for row in json.loads(Path(path).read_text()) if row["answer"]]
    return [generator.choice(golds) for _ in range(count)]


def pairs_of(golds: list[str], generator: random.Random) -> list[tuple[str, str]]:
    """Right answers respelled, wrong ones taken from other rows."""
    pairs = []
    for gold in golds:
        right = generator.random() < 0.5
        answer = gold.replace(r"\frac", r"\dfrac").replace("+", " + ") if right else generator.choice(golds)
        pairs.append((f"First we add, then we divide, so the answer is $\\boxed{{{answer} }}$.", gold))
    return pairs


def bare(pair: tuple[str, str]) -> bool:
    """math-verify as its README calls it, without its timeouts (which need the main thread)."""
    from math_verify import parse, verify

    completion, gold = pair
    target, answer = parse(f"${gold}$", parsing_timeout=None), parse(completion, parsing_timeout=None)
    return verify(target, answer, timeout_seconds=None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="JSON list of rows with an answer")
    parser.add_argument("--count", type=int, default=2000, help="pairs in a pass (default 2000)")
    parser.add_argument("--repeats", type=int, default=3, help="passes after the warm-up, each on new pairs")
    parser.add_argument("--output", help="write the result as JSON")
    options = parser.parse_args()
    generator = random.Random(0)
    rates = {"qurl.answers": [], "math-verify": []}
    with ProcessPoolExecutor(POOL_SIZE) as processes:
        for repeat in range(options.repeats + 1):
            pairs = pairs_of(golds_of(options.data, options.count, generator), generator)
            passes = {
                "qurl.answers": lambda pairs=pairs: check_many(*zip(*pairs, strict=True)),
                "math-verify": lambda pairs=pairs: list(processes.map(bare, pairs, chunksize=16)),
            }
            for name, run in passes.items():
                start = time.perf_counter()
                run()
                if repeat:
                    rates[name].append(len(pairs) / (time.perf_counter() - start))
    result = {
        "pairs": options.count,
        "data": options.data and Path(options.data).name,
        "processes": POOL_SIZE,
        "answers_per_second": {name: round(statistics.median(values)) for name, values in rates.items()},
        "ratio": round(statistics.median(rates["qurl.answers"]) / statistics.median(rates["math-verify"]), 2),
    }
    for name, rate in result["answers_per_second"].items():
        print(f"{name:14} {rate:8} answers/s")
    print(f"ratio {result['ratio']}")
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
