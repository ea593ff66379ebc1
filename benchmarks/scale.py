"""How sync, decoding and training grow with the model and with its completions: measured here, computed for GPUs.

    python -m benchmarks.scale --output data/results/scale/scale.json --figure data/results/scale/scale
    python -m benchmarks.scale --read data/results/scale/scale.json --figure data/results/scale/scale     # draw again

Measured are randomly initialized Qwen2 models of 10 to 290 million parameters: a sync of the FP32 policy into INT8 and
BF16 engines, decoding, and the forward and backward pass of one training step in FP32 (no optimizer, no checkpointing),
each for 16 completions; once by model size (32 tokens), once by length (34 million parameters). Medians of
``--repeats`` after one that warms up. Computed is DAPO's rollout batch on two nodes (`qurl.experiments.scale`).
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.command import parser, save
from qurl.experiments import RunSpec
from qurl.experiments.scale import batch_time, workload
from qurl.plots.scale import scale_figure
from qurl.rollout import RolloutEngine
from qurl.roofline import MODEL_SHAPES

COMPLETIONS, PROMPT, TOKENS, VOCABULARY = 16, 8, 32, 8192
LENGTHS = (32, 128, 512)
# hidden size, MLP, layers, heads, KV heads; head width 64.
SIZES = ((256, 768, 8, 4, 2), (512, 1536, 8, 8, 4), (768, 2304, 12, 12, 4), (1024, 4096, 18, 16, 4))
BY_LENGTH = SIZES[1]


def config_of(size: tuple[int, ...]) -> Qwen2Config:
    hidden, intermediate, layers, heads, kv_heads = size
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=VOCABULARY, tie_word_embeddings=False, max_position_embeddings=2048,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure(size: tuple[int, ...], lengths: tuple[int, ...], repeats: int, seed: int) -> list[dict]:
    """Rows ``parameters, length, part, dtype, seconds, bytes`` of one model."""
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.float32)
    model = {"parameters": policy.num_parameters(), "layers": size[2]}
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCABULARY, (COMPLETIONS, PROMPT), generator=generator).tolist()
    rows = []
    for length in lengths:
        batch = torch.randint(3, VOCABULARY, (COMPLETIONS, PROMPT + length), generator=generator)
        # Long batches in parts of 1,024 tokens, as accumulation would: their logits are what memory holds.
        parts = batch.split(max(1, 1024 // (PROMPT + length)))

        def train(parts=parts):
            for part in parts:
                policy(input_ids=part, labels=part).loss.backward()
            policy.zero_grad()

        rows.append(
            model
            | {
                "length": length,
                "part": "training",
                "dtype": "fp32",
                "seconds": median_seconds(train, repeats),
            }
        )
    with tempfile.TemporaryDirectory() as folder:
        policy.config.save_pretrained(folder)
        for dtype in ("bf16", "int8"):
            with RolloutEngine(
                folder,
                dtype,
                max_model_len=PROMPT + max(lengths),
                max_num_seqs=COMPLETIONS,
                load_weights=False,
            ) as engine:
                reports = [engine.sync(policy.named_parameters()) for _ in range(repeats + 1)][1:]
                sync = {"part": "sync", "dtype": dtype, "bytes": reports[0].bytes}
                sync["seconds"] = statistics.median(report.seconds for report in reports)
                for length in lengths:
                    decode = median_seconds(
                        lambda engine=engine, length=length: engine.generate(
                            prompts, max_tokens=length, temperature=1.0, ignore_eos=True
                        ),
                        repeats,
                    )
                    rows.append(
                        model | {"length": length, "part": "decode", "dtype": dtype, "seconds": decode}
                    )
                    rows.append(model | {"length": length} | sync)
    return rows


def computed() -> pd.DataFrame:
    """DAPO's rollout batch on two nodes of GPUs by model, length and GPUs: ``by, x, part, dtype, seconds, tokens``."""
    dapo = workload(RunSpec(experiment="dapo", preset="paper"))
    cases = [("parameters", shape.weights, replace(dapo, shape=shape), 8) for shape in MODEL_SHAPES.values()]
    for length in (512, 1024, 2048, 4096, 8192, 16_384, 32_768):
        cases.append(("length", length, replace(dapo, longest=length, limit=length + 2048), 8))
    cases += [("gpus", gpus, dapo, gpus) for gpus in (8, 16, 32, 64, 128, 256)]
    rows = []
    for by, x, work, gpus in cases:
        for dtype in ("bf16", "int8"):
            cost = batch_time(work, dtype, "two-nodes", gpus)
            row = {"by": by, "x": x, "dtype": dtype, "completions": work.completions, "longest": work.longest}
            rows.append(row | {"part": "decode", "seconds": cost.prefill + cost.decode})
            rows.append(row | {"part": "sync", "seconds": cost.update})
            if dtype == "bf16":
                rows.append(row | {"part": "training", "seconds": cost.logps + cost.training})
    return pd.DataFrame(rows)


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument("--repeats", type=int, default=2, help="of each measurement")
    command_line.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    command_line.add_argument("--read", help="draw from this file of an earlier run, measure nothing")
    command_line.add_argument("--figure", help="where .svg and .png go, without the ending")
    options = command_line.parse_args()
    if options.read:
        rows = json.loads(Path(options.read).read_text())["rows"]
    else:
        rows = []
        for size in SIZES:
            rows += measure(size, LENGTHS if size == BY_LENGTH else (TOKENS,), options.repeats, options.seed)
            save(rows, options)
    measured = pd.DataFrame(rows)
    print(measured.to_string(index=False, float_format="{:.3f}".format))
    table = computed()
    print(table.pivot(index=["by", "x"], columns=["part", "dtype"], values="seconds").round(2).to_string())
    if options.figure:
        figure = scale_figure(
            measured,
            table,
            f"{COMPLETIONS} completions, 2 cores of an AMD EPYC (Zen 5) shared with other jobs",
        )
        Path(options.figure).parent.mkdir(parents=True, exist_ok=True)
        for ending in ("svg", "png"):
            figure.savefig(f"{options.figure}.{ending}", dpi=110)


if __name__ == "__main__":
    main()
