"""How much faster rollouts become: measured on this machine, whole rollouts and not decoding alone.

One rollout of a training step is **sync** (quantize the policy's weights and load them into the engine),
**prefill** (read the prompts) and **decode** (sample the completions). 8-bit codes speed up the last, cost
something in the first, and what a training step saves is what is left of the sum. So every row holds all
three, and every speed-up is given for decoding and for the whole rollout, against BF16 and against the faster
of the full-precision engines (on a CPU without AMX that is FP32).

The engines live side by side in one process and take turns within each repetition, so that a machine that
warms up slows all of them alike; speed-ups are formed within a repetition, then summarized by median and range.
Other jobs come and go and do not slow all alike: how long each measurement waited for a core is recorded, and
nothing is concluded from disturbed ones.

For machines that are not at hand see ``qurl.roofline``.
"""

import contextlib
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import pydantic

from qurl import arguments
from qurl.arguments import MAX_SEED, MAX_SEQUENCES
from qurl.contention import DISTURBED, longest_wait, thread_waits
from qurl.models import resolve_model
from qurl.notebook import IntList, Parameters
from qurl.roofline import PAPER_RANGE, roofline

__all__ = [
    "PRESETS",
    "QuickstartConfig",
    "SpeedupConfig",
    "mean_over_tokens",
    "measure_rollout",
    "rollout_prompts",
    "roofline",
    "speedup_claims",
    "speedups",
    "summarize",
]


def _each_from(least: int, most: int | None = None) -> pydantic.AfterValidator:
    def check(values: tuple[int, ...]) -> tuple[int, ...]:
        if any(value < least or (most is not None and value > most) for value in values):
            limits = f"of {least} or more" if most is None else f"from {least} to {most}"
            raise ValueError(f"must hold whole numbers {limits}")
        return values

    return pydantic.AfterValidator(check)


QUANTIZED_DTYPES = ("int8", "fp8")
# BF16 in vLLM as it comes: on a CPU qurl also speeds up what surrounds the products, in every dtype.
STOCK_BASELINE = "vllm-bf16"
_BASELINES = (STOCK_BASELINE, "bf16", "fp32")
# Phases of a rollout for which a speed-up is given, with the column of their seconds.
PHASES = {"prefill": "prefill_seconds", "decode": "decode_seconds", "whole rollout": "rollout_seconds"}
_SETTING = ["batch_size", "max_tokens"]

# What each preset measures. `cpu` takes a few minutes on two cores; `paper` is a 7B case of Fig. 8 on one
# GPU.
PRESETS = {
    "smoke": {"model": "tiny", "batch_sizes": (2, 8), "max_tokens": (16,), "repeats": 2},
    "cpu": {"model": "smollm2-135m", "batch_sizes": (8, 64), "max_tokens": (128,), "repeats": 3},
    "paper": {
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "batch_sizes": (16, 64, 256),
        "max_tokens": (1024,),
        "repeats": 3,
    },
}


class QuickstartConfig(Parameters):
    """Parameters of ``notebooks/00_quickstart.ipynb``."""

    model: str = pydantic.Field(examples=["smollm2-135m"])
    dtype: Literal[QUANTIZED_DTYPES] = pydantic.Field(examples=["int8"])
    max_tokens: int = pydantic.Field(ge=2, examples=["48"])
    seed: int = pydantic.Field(ge=0, lt=2**31, examples=["0"])


class SpeedupConfig(Parameters):
    """Parameters of ``pipelines/fig_speedup.ipynb``; what is left empty or 0 comes from the preset."""

    dtype: Literal[QUANTIZED_DTYPES] = pydantic.Field(examples=["int8"])
    model: str = pydantic.Field(examples=["smollm2-135m"])
    batch_sizes: Annotated[IntList, _each_from(1, MAX_SEQUENCES)] = pydantic.Field(examples=["8,64"])
    max_tokens: Annotated[IntList, _each_from(2)] = pydantic.Field(examples=["64"])
    repeats: int = pydantic.Field(ge=0, examples=["3"])
    preset: Literal[tuple(PRESETS)] = pydantic.Field(examples=["cpu"])
    seed: int = pydantic.Field(ge=0, lt=2**31, examples=["0"])
    output_dir: str = pydantic.Field(examples=["runs/speedup"])

    def sizes(self) -> dict[str, Any]:
        """``model, batch_sizes, max_tokens, repeats`` with the preset's values filled in."""
        preset = PRESETS[self.preset]
        return {name: getattr(self, name) or default for name, default in preset.items()}

    def run_name(self) -> str:
        """Name of the folder for results: preset, model and dtype, and whatever else differs from the preset.

        Runs that measure something else never share a folder: "cpu-smollm2-135m-int8" is the preset as it is,
        "cpu-smollm2-135m-int8-batch8,32-seed1" is not.
        """
        sizes, preset = self.sizes(), PRESETS[self.preset]
        labels = {"batch_sizes": "batch", "max_tokens": "tokens", "repeats": "repeats"}
        overridden = {
            label: ",".join(map(str, sizes[name])) if isinstance(sizes[name], tuple) else sizes[name]
            for name, label in labels.items()
            if sizes[name] != preset[name]
        }
        if self.seed:
            overridden["seed"] = self.seed
        return "-".join(
            [self.preset, sizes["model"], self.dtype, *(f"{k}{v}" for k, v in overridden.items())]
        )


_QUESTIONS = (
    "A shop sells pencils in boxes of {a}. A school buys {b} boxes for {c} classes, in equal parts. "
    "How many pencils does each class get, and how many are left over?",
    "The sum of two numbers is {a} and their difference is {b}. What is {c} times the larger one?",
    "A train leaves at {c} o'clock and travels {a} km at {b} km per hour. When does it arrive?",
    "Find the remainder when {a} to the power of {c} is divided by {b}.",
    "A rectangle has a perimeter of {a} cm and one side of {b} cm. What is its area in square centimetres?",
    "What is the probability that a number drawn from 1 to {a} is a multiple of {c} but not of {b}?",
    "Solve for x: {c}x + {b} = {a}. Write the answer as a fraction in lowest terms.",
    "A tank holds {a} litres. One pipe fills {b} litres per minute, another drains {c}. When is it full?",
)


def rollout_prompts(tokenizer, count: int, seed: int = 0) -> list[list[int]]:
    """Ids of ``count`` different math questions, rendered by the model's chat template.

    A model without a chat template gets the plain questions. (``tiny`` knows few of their letters, which does
    not matter for its speed.)

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    count : int
    seed : int

    Returns
    -------
    list of list of int
    """
    generator = random.Random(seed)
    # No two prompts are equal, so that none is served from another one's cache.
    firsts = generator.sample(range(1000, 10000), 9000)[:count]
    prompts = []
    for index, a in enumerate(firsts):
        b, c = generator.randrange(100, 1000), generator.randrange(2, 10)
        question = _QUESTIONS[index % len(_QUESTIONS)].format(a=a, b=b, c=c)
        if tokenizer.chat_template is None:
            prompts.append(tokenizer.encode(question))
            continue
        # The template writes the start token itself: rendering to ids in one go never adds a second one.
        prompts.append(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        )
    return prompts


def measure_rollout(
    model: str = "smollm2-135m",
    dtype: str = "int8",
    *,
    batch_sizes: Sequence[int] = (8, 64),
    max_tokens: int | Sequence[int] = 128,
    repeats: int = 3,
    seed: int = 0,
    baselines: Sequence[str] | None = None,
    report: Callable[[str], None] | None = None,
    **engine_options,
) -> pd.DataFrame:
    """Time rollouts of a quantized engine and of the full-precision ones, in turns.

    Each measurement syncs the weights (which also empties the prefix cache), samples one token per prompt,
    syncs again and samples ``max_tokens`` per prompt, never ending early: the first is the prefill, the
    difference the decoding of the other ``max_tokens - 1``. All shapes are run once before anything is timed.

    Parameters
    ----------
    model : str
        Anything that ``qurl.models.resolve_model`` accepts.
    dtype : {"int8", "fp8"}
        Of the quantized engine.
    batch_sizes : sequence of int
        Sequences sampled at once, each from its own prompt.
    max_tokens : int or sequence of int
        Completion lengths, 2 or more.
    repeats : int
        Repetitions after the warm-up.
    seed : int
        Of prompts and sampling.
    baselines : sequence of str, optional
        Full-precision engines. Default: BF16, and on a CPU also FP32 and "vllm-bf16": BF16 with nothing of
        qurl's around the products, which is what one runs without qurl.
    report : callable, optional
        Called with one line of progress after each measurement, and with a warning at the end if other jobs
        disturbed some.
    **engine_options
        Passed on to every ``RolloutEngine``.

    Returns
    -------
    pandas.DataFrame
        One row per repetition, batch size, completion length and engine dtype. Times in seconds:
        ``sync_seconds`` (= ``quantize_seconds`` + ``load_seconds`` + checks), ``prefill_seconds``,
        ``decode_seconds``, ``rollout_seconds`` (the sum of the three). Tokens per second:
        ``prefill_tokens_per_second`` (prompt tokens), ``decode_tokens_per_second`` and
        ``rollout_tokens_per_second`` (sampled tokens, over decoding and over the whole rollout).
        ``waited_share``: the share of the measurement's time for which one of the process's threads was ready
        but had no core (see ``qurl.contention``); NaN where the system does not count it. ``model,
        parameters, hardware, device, linear_kernel, emulated`` say what ran; ``attrs["engines"]`` holds the
        full description of each engine, versions included.

    Raises
    ------
    ValueError
        If ``dtype`` is unknown, a size is not possible, no baseline is left, prompt and completion are longer than the
        model takes, or a batch needs more memory than the engines have for keys and values.
    FileNotFoundError, qurl.models.ModelUnavailableError
        If the model cannot be had.

    Notes
    -----
    The policy that is synced is an FP32 copy of the checkpoint on the engine's device, as TRL would hold it.
    """
    arguments.model_name(model)
    arguments.choice("dtype", dtype, QUANTIZED_DTYPES)
    batch_sizes = arguments.whole_numbers("batch_sizes", batch_sizes, 1, MAX_SEQUENCES)
    lengths = max_tokens if isinstance(max_tokens, Iterable) else [max_tokens]
    lengths = arguments.whole_numbers("max_tokens", lengths, 2)
    repeats = arguments.whole_number("repeats", repeats, 1)
    seed = arguments.whole_number("seed", seed, 0, MAX_SEED)
    if baselines is not None:
        if isinstance(baselines, str) or not baselines:
            raise ValueError(f"baselines={baselines!r} is not possible: use a list of some of {_BASELINES}.")
        for name in baselines:
            arguments.choice("baselines", name, _BASELINES)
    folder = resolve_model(model)
    _check_fits(folder, model, lengths, prompt_tokens=1)

    import torch
    from transformers import AutoTokenizer

    from qurl.rollout import RolloutEngine
    from qurl.rollout.sync import checkpoint_tensors

    if baselines is None:
        baselines = ("bf16",) if torch.cuda.is_available() else _BASELINES
    say = report or (lambda line: None)
    prompts = rollout_prompts(AutoTokenizer.from_pretrained(folder), max(batch_sizes), seed)
    longest = max(map(len, prompts))
    _check_fits(folder, model, lengths, longest)
    # TRL keeps the policy in FP32 by default, on the device that it trains on; a sync starts from there.
    on_gpu = torch.cuda.is_available()
    policy = [
        (name, tensor.to("cuda" if on_gpu else "cpu", torch.float32))
        for name, tensor in checkpoint_tensors(folder)
    ]
    if on_gpu:
        # vLLM claims a share of the whole GPU for each engine; the policy and CUDA itself need the rest.
        engine_options.setdefault("gpu_memory_utilization", 0.6 / (1 + len(baselines)))

    options = {
        "max_num_seqs": max(batch_sizes),
        "max_model_len": longest + max(lengths),
        "seed": seed,
        **engine_options,
    }
    rows = []
    with contextlib.ExitStack() as stack:
        engines = {}
        for name in (*baselines, dtype):
            started = time.perf_counter()
            stock = {"kernels": "vllm"} if name.startswith("vllm-") else {}
            engine = RolloutEngine(model, name.removeprefix("vllm-"), load_weights=False, **options, **stock)
            engines[name] = stack.enter_context(engine)
            if (fitting := engine.kv_cache_tokens // options["max_model_len"]) < max(batch_sizes):
                raise ValueError(
                    f"batch_sizes={batch_sizes} is not possible, since the {name} engine keeps keys and values of "
                    f"{engine.kv_cache_tokens} tokens and others would wait: use at most {fitting} sequences of "
                    f"{options['max_model_len']} tokens."
                )
            engines[name].sync(policy)
            for batch_size in batch_sizes:
                engines[name].generate(prompts[:batch_size], max_tokens=2, ignore_eos=True)
            say(f"{name} engine started and warmed up in {time.perf_counter() - started:.0f} s")

        rounds = [(r, b, t) for r in range(repeats) for b in batch_sizes for t in lengths]
        total = len(rounds) * len(engines)
        started = time.perf_counter()
        for repetition, batch_size, length in rounds:
            # Each engine goes first in turn: whoever follows a long run finds a warmer machine.
            order = list(engines)[repetition % len(engines) :] + list(engines)[: repetition % len(engines)]
            for name in order:
                row = {
                    "repetition": repetition,
                    "batch_size": batch_size,
                    "max_tokens": length,
                    "dtype": name,
                }
                row |= _one_rollout(engines[name], policy, prompts[:batch_size], length)
                rows.append(row)
                left = (time.perf_counter() - started) * (total / len(rows) - 1)
                say(
                    f"[{len(rows)}/{total}] {name}, batch {batch_size}, {length} tokens: "
                    f"sync {row['sync_seconds']:.2f} s, prefill {row['prefill_seconds']:.2f} s, "
                    f"decode {row['decode_seconds']:.2f} s ({row['decode_tokens_per_second']:.0f} tokens/s); "
                    f"about {left:.0f} s left"
                )
        descriptions = {name: dict(engine.description) for name, engine in engines.items()}

    waited = pd.Series([row["waited_share"] for row in rows])
    if count := (waited > DISTURBED).sum():
        say(
            f"Other jobs disturbed {count} of {len(rows)} measurements, which waited up to "
            f"{waited.max():.0%} of their time for a core: run it again on an idle machine."
        )
    shown = ["parameters", "hardware", "device", "linear_kernel", "emulated"]
    about = pd.DataFrame.from_dict(descriptions, orient="index").reindex(columns=shown)
    frame = pd.DataFrame(rows).join(about, on="dtype")
    frame.insert(0, "model", model)
    frame.attrs["engines"] = descriptions
    return frame


def _check_fits(folder: Path, model: str, lengths: list[int], prompt_tokens: int) -> None:
    """Prompt and completion must be no longer than the model takes."""
    limit = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    if limit is not None and prompt_tokens + max(lengths) > limit:
        raise ValueError(
            f"max_tokens={lengths} is not possible, since {str(model)!r} takes {limit} tokens, prompt included: use at "
            f"most {limit - prompt_tokens}."
        )


def _one_rollout(engine, policy, prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
    """Seconds and rates of one rollout; each part after a sync, so that no prompt is in the prefix cache."""
    started, waits = time.perf_counter(), thread_waits()
    engine.sync(policy)
    first = engine.generate(prompts, max_tokens=1, ignore_eos=True)
    sync = engine.sync(policy)
    full = engine.generate(prompts, max_tokens=max_tokens, ignore_eos=True)
    waited_share = longest_wait(waits, thread_waits()) / (time.perf_counter() - started)
    # A difference of two short times can come out negative by chance: not a number then, rather than a rate.
    decode_seconds = full.seconds - first.seconds if full.seconds > first.seconds else float("nan")
    return {
        "quantize_seconds": sync.quantize_seconds,
        "load_seconds": sync.load_seconds,
        "sync_seconds": sync.seconds,
        "prefill_seconds": first.seconds,
        "decode_seconds": decode_seconds,
        "rollout_seconds": sync.seconds + full.seconds,
        "prompt_tokens": full.prompt_tokens,
        "completion_tokens": full.completion_tokens,
        "prefill_tokens_per_second": first.prompt_tokens / first.seconds,
        "decode_tokens_per_second": len(prompts) * (max_tokens - 1) / decode_seconds,
        "rollout_tokens_per_second": full.completion_tokens / (sync.seconds + full.seconds),
        "waited_share": waited_share,
    }


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians over the repetitions, one row per batch size, completion length and engine dtype.

    Parameters
    ----------
    rows : pandas.DataFrame
        From ``measure_rollout``.

    Returns
    -------
    pandas.DataFrame
        Median seconds of sync, prefill, decoding and the whole rollout; tokens per second of each, with the
        lowest and highest of the decoding and of the whole rollout; ``sync_share`` of the whole rollout's
        time.
    """
    columns = [c for c in rows.columns if c.endswith(("_seconds", "_per_second"))]
    shares = rows.assign(sync_share=rows["sync_seconds"] / rows["rollout_seconds"])
    groups = shares.groupby([*_SETTING, "dtype"], sort=False)
    table = groups[[*columns, "sync_share"]].median()
    for column in ("decode_tokens_per_second", "rollout_tokens_per_second"):
        table[f"{column}_low"], table[f"{column}_high"] = groups[column].min(), groups[column].max()
    return table.reset_index()


def speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """How many times faster the quantized engine is, per phase and baseline.

    Parameters
    ----------
    rows : pandas.DataFrame
        From ``measure_rollout``.

    Returns
    -------
    pandas.DataFrame
        One row per batch size, completion length, quantized dtype, phase ("prefill", "decode", "whole
        rollout") and baseline: ``speedup`` is the median over the repetitions of the baseline's seconds over
        the quantized engine's in the same repetition, ``low`` and ``high`` its range (of three to five
        repetitions, quartiles would be made up), ``repetitions`` their number. ``waited_share`` is the median
        over the repetitions of that of the more disturbed of the two engines. ``baseline`` names a
        full-precision dtype; ``fastest`` is True for the one of least median seconds in that phase, setting
        by setting.
    """
    if "waited_share" not in rows:  # measured before it was recorded
        rows = rows.assign(waited_share=float("nan"))
    ratios = []
    for setting, group in rows.groupby(_SETTING, sort=False):
        # As the engines were started: what one would run without qurl comes first.
        quantized = [name for name in group["dtype"].unique() if name in QUANTIZED_DTYPES]
        baselines = [name for name in group["dtype"].unique() if name not in QUANTIZED_DTYPES]
        waited = group.pivot(index="repetition", columns="dtype", values="waited_share")
        for phase, column in PHASES.items():
            seconds = group.pivot(index="repetition", columns="dtype", values=column)
            medians = seconds[baselines].median()
            for dtype, baseline in itertools.product(quantized, baselines):
                of = dict(zip(_SETTING, setting, strict=True)) | {"dtype": dtype, "phase": phase}
                ratio = pd.DataFrame(
                    {
                        "speedup": seconds[baseline] / seconds[dtype],
                        "waited_share": waited[[baseline, dtype]].max(axis=1, skipna=False),
                    }
                )
                fastest = medians[baseline] == medians.min()
                ratios.append(ratio.assign(**of, baseline=baseline, fastest=fastest))
    groups = pd.concat(ratios).groupby([*_SETTING, "dtype", "phase", "baseline", "fastest"], sort=False)
    return groups.agg(
        speedup=("speedup", "median"),
        low=("speedup", "min"),
        high=("speedup", "max"),
        repetitions=("speedup", "count"),
        waited_share=("waited_share", "median"),
    ).reset_index()


def speedup_claims(rows: pd.DataFrame, preset: str) -> list[dict[str, Any]]:
    """The paper's claims about rollout speed beside what was measured.

    Parameters
    ----------
    rows : pandas.DataFrame
        From ``measure_rollout``.
    preset : str

    Returns
    -------
    list of dict
        Per batch size and completion length: ``claim``, ``paper`` and ``ours`` (text), ``verdict``, ``reason``. The
        first claim is judged on the whole rollout (sync, prefill and decode) against BF16 that differs in the
        quantization only; on a CPU the next against BF16 in vLLM as it comes; and, if that is neither, against
        the fastest engine.

    Notes
    -----
    With L, the lower end of the paper's range (1.2), the verdict is

    - "not testable with this preset" at preset "smoke", or if the machine emulates the dtype; else
    - "undecided" after one repetition, or if the median ``waited_share`` exceeds ``qurl.contention.DISTURBED``;
    - "reproduced" if every repetition reaches L, "not reproduced" if none does, "undecided" if some do.

    A disturbed repetition among undisturbed ones can thus prevent a verdict and never makes one.
    """
    table = speedups(rows)
    table = table[table["phase"] == "whole rollout"]
    dtype = table["dtype"].iloc[0]
    engine = rows[rows["dtype"] == dtype].iloc[0]
    low, high = PAPER_RANGE

    def judged(claim: str, row: pd.Series) -> dict[str, Any]:
        ours = f"{row.speedup:.2f} times {row.baseline} ({row.low:.2f} to {row.high:.2f})"
        if preset == "smoke":
            verdict, reason = (
                "not testable with this preset",
                "the model is too small for its linears to matter",
            )
        elif engine["emulated"]:
            verdict = "not testable with this preset"
            reason = (
                f"this machine has no {dtype} units: its kernel ({engine['linear_kernel']}) emulates them"
            )
        elif row.repetitions == 1:
            verdict, reason = "undecided", "one repetition has no range"
        elif row.waited_share > DISTURBED:
            verdict = "undecided"
            reason = (
                f"other jobs ran: the engines waited {row.waited_share:.0%} of the time for a core; run it "
                "again on an idle machine"
            )
        elif row.low >= low:
            verdict = "reproduced"
            reason = f"on {engine['hardware']} with {engine['parameters'] / 1e6:.0f}M weights"
            if row.speedup > high:
                reason += ", beyond the paper's range"
        elif row.high < low:
            verdict, reason = "not reproduced", f"less than {low} times, on {engine['hardware']}"
        else:
            verdict = "undecided"
            reason = f"the repetitions range from {row.low:.2f} to {row.high:.2f}, on both sides of {low}"
        return {
            "batch_size": int(row.batch_size),
            "max_tokens": int(row.max_tokens),
            "claim": claim,
            "paper": f"{low} to {high} times BF16",
            "ours": ours,
            "verdict": verdict,
            "reason": reason,
        }

    titles = {
        "bf16": f"quantization alone: {dtype} rollouts are 20 to 80 % faster than BF16 (Fig. 8)",
        STOCK_BASELINE: f"qurl as a whole (attention, sampler, norms too), {dtype}, against BF16 in vLLM as it comes",
    }
    claims = []
    for _, setting in table.groupby(_SETTING, sort=False):
        for baseline, title in titles.items():
            row = setting[setting["baseline"] == baseline]
            if len(row):
                claims.append(judged(title, row.iloc[0]))
        fastest = setting[setting["fastest"]].iloc[0]
        if fastest["baseline"] not in titles:
            claims.append(judged("the same against this machine's fastest full-precision engine", fastest))
    return claims


def mean_over_tokens(values: pd.Series, sequences: pd.Series) -> tuple[float, float]:
    """Mean of one value per token, and its standard error over the sequences.

    Tokens of one sequence depend on each other; counted as independent they would make the error look too small.

    Parameters
    ----------
    values : pandas.Series
        One per token.
    sequences : pandas.Series
        The number of each token's sequence.

    Returns
    -------
    mean, standard_error : float
        The error is that of a ratio of sums over sequences, sqrt(G/(G-1) Σ_g (Σ_t (x_gt - mean))²) / tokens for G
        sequences; NaN for a single one.
    """
    deviations = (values - values.mean()).groupby(sequences).sum()
    count = len(deviations)
    variance = (deviations**2).sum() * count / (count - 1) if count > 1 else float("nan")
    return values.mean(), math.sqrt(variance) / len(values)
