"""Rollout benchmark: times of a stand-in engine whose seconds are known, so that every number can be worked by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from qurl.benchmark import (
    PRESETS,
    SpeedupConfig,
    mean_over_tokens,
    measure_rollout,
    rollout_prompts,
    speedup_claims,
    speedups,
    summarize,
)
from qurl.contention import DISTURBED
from qurl.models import resolve_model
from qurl.notebook import ParameterError, parse

# Seconds per decode step at batch 2 and 4, and of a sync: FP32 is the faster baseline at batch 4, BF16 at batch 2.
STEP = {"bf16": {2: 0.010, 4: 0.040}, "fp32": {2: 0.020, 4: 0.030}, "int8": {2: 0.005, 4: 0.010}}
SYNC = {"vllm-bf16": 0.02, "bf16": 0.02, "fp32": 0.02, "int8": 0.06}
PREFILL = 0.1


class StandInEngine:
    """A ``RolloutEngine`` with a clock of its own; keeps a record of what it is asked to do."""

    calls: list[tuple]
    kv_cache_tokens = 10**6

    def __init__(self, model, dtype, **options):
        self.dtype, self.options = dtype, options
        self.description = {
            "model": model,
            "parameters": 1_800_000,
            "hardware": "stand-in",
            "device": "cpu",
            "linear_kernel": f"{dtype}-kernel",
            "emulated": dtype == "fp8",
            "versions": {"vllm": "0"},
        }
        self.calls.append(("start", dtype, options.get("kernels", "qurl")))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.calls.append(("close", self.dtype))

    def sync(self, named_params):
        assert any(name.endswith("q_proj.weight") for name, _ in named_params)
        self.calls.append(("sync", self.dtype))
        seconds = SYNC[self.dtype]
        return SimpleNamespace(seconds=seconds, quantize_seconds=seconds / 3, load_seconds=seconds / 2)

    def generate(self, prompt_ids, max_tokens, ignore_eos):
        assert ignore_eos
        self.calls.append(("generate", self.dtype, len(prompt_ids), max_tokens))
        seconds = PREFILL + STEP[self.dtype][len(prompt_ids)] * (max_tokens - 1)
        return SimpleNamespace(
            seconds=seconds,
            prompt_tokens=sum(map(len, prompt_ids)),
            completion_tokens=len(prompt_ids) * max_tokens,
        )


@pytest.fixture
def stand_in(monkeypatch):
    rollout = pytest.importorskip("qurl.rollout")
    monkeypatch.setattr(rollout, "RolloutEngine", StandInEngine)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    # A stand-in's measurement lasts microseconds, of which any other process could take a large share.
    monkeypatch.setattr("qurl.benchmark.longest_wait", lambda before, after: 0.0)
    StandInEngine.calls = []
    return StandInEngine


@pytest.fixture
def rows(stand_in):
    return measure_rollout(
        "tiny", "int8", batch_sizes=(2, 4), max_tokens=(11, 21), repeats=3, baselines=("bf16", "fp32")
    )


def test_one_row_per_measurement(rows):
    assert len(rows) == 3 * 2 * 2 * 3
    key = ["repetition", "batch_size", "max_tokens", "dtype"]
    assert not rows.duplicated(key).any()
    assert set(rows["dtype"]) == {"bf16", "fp32", "int8"}
    assert rows.notna().all(axis=None)
    assert set(rows.attrs["engines"]) == {"bf16", "fp32", "int8"}
    assert rows.attrs["engines"]["int8"]["versions"] == {"vllm": "0"}


def test_phases_are_separate_and_add_up(rows):
    row = rows[(rows["dtype"] == "int8") & (rows["batch_size"] == 4) & (rows["max_tokens"] == 11)].iloc[0]
    assert row["sync_seconds"] == 0.06
    assert row["quantize_seconds"] == pytest.approx(0.02)
    assert row["prefill_seconds"] == pytest.approx(0.1)
    assert row["decode_seconds"] == pytest.approx(10 * 0.010)
    assert row["rollout_seconds"] == pytest.approx(0.06 + 0.1 + 0.1)
    # 4 sequences x 10 tokens in 0.1 s of decoding; 4 x 11 in 0.26 s of the whole rollout.
    assert row["decode_tokens_per_second"] == pytest.approx(400)
    assert row["rollout_tokens_per_second"] == pytest.approx(44 / 0.26)
    assert row["prefill_tokens_per_second"] == pytest.approx(row["prompt_tokens"] / 0.1)
    parts = rows[["sync_seconds", "prefill_seconds", "decode_seconds"]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(rows["rollout_seconds"].to_numpy())
    # Model size and hardware stand beside every number (case E11).
    assert (rows["parameters"] == 1_800_000).all()
    assert (rows["hardware"] == "stand-in").all()
    assert row["linear_kernel"] == "int8-kernel"


def test_speedups_by_hand(rows):
    table = speedups(rows).set_index(["batch_size", "max_tokens", "phase", "baseline"]).sort_index()
    at = table.loc[(4, 11, "decode")]
    assert at.loc["bf16", "speedup"] == pytest.approx(4.0)
    assert at.loc["fp32", "speedup"] == pytest.approx(3.0)
    assert at["fastest"].to_dict() == {"bf16": False, "fp32": True}
    # Whole: BF16 0.02 + 0.1 + 0.4 = 0.52, FP32 0.42, INT8 0.26 seconds.
    whole = table.loc[(4, 11, "whole rollout")]
    assert whole.loc["bf16", "speedup"] == pytest.approx(2.0)
    assert whole.loc["fp32", "speedup"] == pytest.approx(0.42 / 0.26)
    assert table.loc[(2, 11, "decode"), "fastest"].to_dict() == {"bf16": True, "fp32": False}
    assert table["low"].to_numpy() == pytest.approx(table["high"].to_numpy())


def test_a_faster_decode_can_be_a_slower_rollout(stand_in, monkeypatch):
    """Case E11: quantizing and loading at each sync can cost more than decoding gains; the table must show it."""
    monkeypatch.setitem(SYNC, "int8", 5.0)
    table = speedups(
        measure_rollout("tiny", "int8", batch_sizes=[2], max_tokens=11, repeats=1, baselines=("bf16", "fp32"))
    )
    by_phase = table[table["baseline"] == "bf16"].set_index("phase")["speedup"]
    assert by_phase["decode"] == pytest.approx(2.0)
    assert by_phase["whole rollout"] < 0.1


def test_speedups_pair_within_a_repetition():
    """A machine half as fast in the second repetition slows both engines, and the ratio stays 2."""
    rows = pd.DataFrame(
        [
            {
                "repetition": repetition,
                "batch_size": 8,
                "max_tokens": 4,
                "dtype": dtype,
                "prefill_seconds": 0.0,
                "decode_seconds": seconds * slow,
                "rollout_seconds": seconds * slow,
            }
            for repetition, slow in enumerate((1, 2, 1))
            for dtype, seconds in (("bf16", 2.0), ("int8", 1.0))
        ]
    )
    decode = speedups(rows).set_index("phase").loc["decode"]
    assert (decode["speedup"], decode["low"], decode["high"], decode["repetitions"]) == (2, 2, 2, 3)
    # These rows, as those committed before waiting was recorded, say nothing about it.
    assert math.isnan(decode["waited_share"])


def test_a_decode_shorter_than_its_prefill_leaves_the_whole_rollout(rows):
    """Other jobs can slow the prefill alone: decoding is not a number then, and the rollout's time still is one."""
    one = (rows["dtype"] == "int8") & (rows["batch_size"] == 4) & (rows["max_tokens"] == 11)
    rows.loc[one & (rows["repetition"] == 0), "decode_seconds"] = float("nan")
    table = speedups(rows).set_index(["batch_size", "max_tokens", "phase", "baseline"]).sort_index()
    decode, whole = (table.loc[(4, 11, phase, "bf16")] for phase in ("decode", "whole rollout"))
    assert (decode["high"], decode["repetitions"]) == (pytest.approx(4), 2)
    assert (whole["high"], whole["repetitions"]) == (pytest.approx(2), 3)


def test_summary(rows):
    table = summarize(rows).set_index(["batch_size", "max_tokens", "dtype"])
    assert len(table) == 2 * 2 * 3
    row = table.loc[(4, 11, "int8")]
    assert row["sync_share"] == pytest.approx(0.06 / 0.26)
    assert row["decode_tokens_per_second_low"] <= row["decode_tokens_per_second"]


def test_warm_up_turns_and_cache(stand_in):
    measure_rollout("tiny", "int8", batch_sizes=[2], max_tokens=11, repeats=3, baselines=("bf16", "fp32"))
    calls = stand_in.calls
    timed = calls[max(i for i, call in enumerate(calls) if call[0] == "start") + 3 :]
    # Every shape ran before: each engine generated for each batch size.
    assert {call[1:3] for call in calls if call[0] == "generate" and call[3] == 2} == {
        (dtype, 2) for dtype in ("bf16", "fp32", "int8")
    }
    timed = [call for call in timed if call[0] != "close"]
    # Each measurement is sync, one token, sync, all tokens: no prompt is left in the prefix cache.
    groups = [timed[i : i + 4] for i in range(0, len(timed), 4)]
    for group in groups:
        assert [(call[0], *call[3:]) for call in group] == [
            ("sync",),
            ("generate", 1),
            ("sync",),
            ("generate", 11),
        ]
        assert len({call[1] for call in group}) == 1
    # Engines alternate, and each goes first once.
    order = [group[0][1] for group in groups]
    assert order == ["bf16", "fp32", "int8", "fp32", "int8", "bf16", "int8", "bf16", "fp32"]
    assert [call[1] for call in calls if call[0] == "close"] == ["int8", "fp32", "bf16"]


def test_progress_is_one_line_per_measurement(stand_in):
    lines = []
    measure_rollout(
        "tiny",
        "int8",
        batch_sizes=[2],
        max_tokens=11,
        repeats=2,
        report=lines.append,
        baselines=("bf16", "fp32"),
    )
    assert len(lines) == 3 + 6
    assert lines[-1].startswith("[6/6] ")
    assert not any("\n" in line for line in lines)


def test_impossible_arguments_are_refused_before_any_engine(stand_in):
    for change, message in (
        ({"model": None}, "model=None is not possible"),
        ({"model": "tinny"}, "model='tinny' is not known: use one of 'tiny'"),
        ({"dtype": "fp4"}, "dtype='fp4' is not possible: use one of 'int8', 'fp8'"),
        ({"batch_sizes": []}, r"batch_sizes=\[\] is not possible"),
        ({"batch_sizes": [0]}, r"batch_sizes=\[0\] is not possible"),
        (
            {"batch_sizes": [8, 4097]},
            r"batch_sizes=\[8, 4097\] is not possible: use whole numbers from 1 to 4096",
        ),
        ({"batch_sizes": "8,64"}, "batch_sizes='8,64' is not possible"),
        ({"batch_sizes": [True]}, r"batch_sizes=\[True\] is not possible"),
        ({"seed": -1}, "seed=-1 is not possible: use a whole number from 0 to 4294967295"),
        # The model takes 512 tokens. Found before the prompts are encoded, then with the longest of them.
        (
            {"max_tokens": 512},
            r"max_tokens=\[512\] is not possible, since 'tiny' takes 512 tokens, .* at most 511",
        ),
        ({"max_tokens": [8, 500]}, r"max_tokens=\[8, 500\] is not possible, since 'tiny' takes 512 tokens"),
        ({"max_tokens": 1}, r"max_tokens=\[1\] is not possible: use whole numbers of 2 or more"),
        ({"repeats": 0}, "repeats="),
        (
            {"baselines": ()},
            r"baselines=\(\) is not possible: use a list of some of \('vllm-bf16', 'bf16', 'fp32'\)",
        ),
        ({"baselines": "bf16"}, "baselines='bf16' is not possible"),
        ({"baselines": ["int8"]}, "baselines='int8' is not possible"),
    ):
        with pytest.raises(ValueError, match=message):
            measure_rollout(**({"model": "tiny", "dtype": "int8"} | change))
    assert stand_in.calls == []


def test_a_batch_that_does_not_fit_into_the_cache_is_refused(stand_in, monkeypatch):
    """Sequences that wait for memory would be timed as if they had been decoded together."""
    monkeypatch.setattr(stand_in, "kv_cache_tokens", 1000)
    with pytest.raises(
        ValueError, match=r"batch_sizes=\[2, 64\] is not possible, since the vllm-bf16 engine keeps keys"
    ):
        measure_rollout("tiny", "int8", batch_sizes=[2, 64], max_tokens=11)
    assert [call[0] for call in stand_in.calls] == ["start", "close"]


def test_standard_error_by_hand():
    """Tokens 1, 2 of one sequence and 3 of another: mean 2, deviations -1 + 0 and 1, so sqrt(2/1 · (1 + 1)) / 3."""
    assert mean_over_tokens(pd.Series([1.0, 2.0, 3.0]), pd.Series([0, 0, 1])) == pytest.approx((2, 2 / 3))
    # One token to a sequence: the standard error that pandas gives.
    values = pd.Series([1.0, 2.0, 4.0, 9.0])
    assert mean_over_tokens(values, pd.Series(range(4)))[1] == pytest.approx(values.sem())
    assert math.isnan(mean_over_tokens(values, pd.Series([0] * 4))[1])


def test_folders_are_named_by_what_differs_from_the_preset():
    """Another size must not overwrite the result of the preset."""

    def name(**changed):
        values = dict.fromkeys(("model", "batch_sizes", "max_tokens", "output_dir"), "")
        values |= {"dtype": "int8", "repeats": 0, "preset": "cpu", "seed": 0}
        return parse(SpeedupConfig, values | changed).run_name()

    assert name() == name(batch_sizes="8,64", repeats=3, model="smollm2-135m") == "cpu-smollm2-135m-int8"
    assert name(model="tiny", dtype="fp8") == "cpu-tiny-fp8"
    assert (
        name(batch_sizes="8,32", max_tokens=[16], repeats=1, seed=5)
        == "cpu-smollm2-135m-int8-batch8,32-tokens16-repeats1-seed5"
    )


def test_prompts_are_distinct_and_rendered_once():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    prompts = rollout_prompts(tokenizer, 64, seed=3)
    assert len({tuple(prompt) for prompt in prompts}) == 64
    assert prompts == rollout_prompts(tokenizer, 64, seed=3) != rollout_prompts(tokenizer, 64, seed=4)
    # A smaller batch uses the first ones of a larger one, with or without a template around the text.
    tokenizer.chat_template = None
    assert rollout_prompts(tokenizer, 5, seed=3) == prompts[:5]


def test_one_start_token():
    """Case E08: the template prints the start token, and the tokenizer would add another one."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    start = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", start)]
    )
    tokenizer.chat_template = "<eos>{{ messages[0]['content'] }}"
    assert tokenizer.encode("1+2=")[0] == start
    for prompt in rollout_prompts(tokenizer, 8):
        assert prompt[0] == start
        assert prompt.count(start) == 1


def test_preset_fills_what_is_left_empty():
    values = {
        "dtype": "fp8",
        "model": "",
        "batch_sizes": "8,64",
        "max_tokens": "",
        "repeats": 0,
        "preset": "smoke",
        "seed": 0,
        "output_dir": "",
    }
    sizes = parse(SpeedupConfig, values).sizes()
    assert sizes == PRESETS["smoke"] | {"batch_sizes": (8, 64)}
    assert set(sizes) == {"model", "batch_sizes", "max_tokens", "repeats"}
    for preset in PRESETS:
        assert parse(SpeedupConfig, values | {"preset": preset}).sizes()["repeats"] >= 2
    with pytest.raises(ParameterError, match="preset='huge' must be 'smoke', 'cpu' or 'paper'"):
        parse(SpeedupConfig, values | {"preset": "huge"})


def test_claims(rows):
    """One verdict for each setting, not for the most flattering alone."""
    claims = speedup_claims(rows, "cpu")
    found = [
        (claim["batch_size"], claim["max_tokens"], claim["verdict"], claim["ours"].split(" (")[0])
        for claim in claims
    ]
    # Sync, prefill and decoding of 2 sequences: BF16 0.02 + 0.1 + 0.1 = 0.22 s, INT8 0.06 + 0.1 + 0.05 = 0.21 s, and
    # with 21 tokens 0.32 and 0.26. Batches of 4: BF16 0.52, FP32 0.42, INT8 0.26; with 21 tokens 0.92, 0.72, 0.36.
    assert found == [
        (2, 11, "not reproduced", "1.05 times bf16"),
        (2, 21, "reproduced", "1.23 times bf16"),
        (4, 11, "reproduced", "2.00 times bf16"),
        (4, 11, "reproduced", "1.62 times fp32"),
        (4, 21, "reproduced", "2.56 times bf16"),
        (4, 21, "reproduced", "2.00 times fp32"),
    ]
    assert "beyond the paper's range" in claims[-1]["reason"]
    assert claims[0]["paper"] == "1.2 to 1.8 times BF16"


def test_claims_that_cannot_be_judged_here(rows):
    assert {claim["verdict"] for claim in speedup_claims(rows, "smoke")} == {"not testable with this preset"}
    emulated = rows.assign(emulated=rows["dtype"] == "int8")
    for claim in speedup_claims(emulated, "cpu"):
        assert claim["verdict"] == "not testable with this preset"
        assert "int8-kernel" in claim["reason"]


def rows_of(*ratios: float, waited: tuple[float, ...] | None = None, baseline_waited: float = 0.0):
    """One setting, in whose repetitions BF16 takes ``ratios`` seconds and INT8 one."""
    return pd.DataFrame(
        [
            {
                "repetition": repetition,
                "batch_size": 8,
                "max_tokens": 4,
                "dtype": dtype,
                "prefill_seconds": 0.1,
                "decode_seconds": seconds - 0.1,
                "rollout_seconds": seconds,
                "waited_share": baseline_waited
                if dtype == "bf16"
                else (waited or [0.0] * len(ratios))[repetition],
                "parameters": 1_800_000,
                "hardware": "stand-in",
                "linear_kernel": "kernel",
                "emulated": False,
            }
            for repetition, ratio in enumerate(ratios)
            for dtype, seconds in (("bf16", ratio), ("int8", 1.0))
        ]
    )


@pytest.mark.parametrize(
    ("rows", "verdict", "reason"),
    [
        (rows_of(1.2, 1.5, 1.7), "reproduced", "on stand-in with 2M weights"),
        (rows_of(1.2, 1.9, 2.0), "reproduced", "beyond the paper's range"),
        (rows_of(0.9, 1.1, 1.19), "not reproduced", "less than 1.2 times"),
        # A median on either side of 1.2 decides nothing while the repetitions lie on both.
        (rows_of(0.40, 1.75, 2.19), "undecided", "range from 0.40 to 2.19, on both sides of 1.2"),
        (rows_of(1.1, 1.15, 1.3), "undecided", "range from 1.10 to 1.30"),
        (rows_of(1.5), "undecided", "one repetition has no range"),
        # Disturbed: either engine, and neither a success nor a failure counts.
        (
            rows_of(1.47, 2.52, 2.66, waited=(0.3, 0.3, 0.0)),
            "undecided",
            "waited 30% of the time for a core; run it",
        ),
        (rows_of(0.5, 0.6, 0.7, baseline_waited=0.4), "undecided", "waited 40% of the time"),
        # One of three: the other two agree with it.
        (rows_of(1.47, 2.52, 2.66, waited=(0.3, 0.01, 0.02)), "reproduced", "beyond the paper's range"),
        # Not counted by this system, or measured before it was recorded.
        (rows_of(1.3, 1.4, waited=(math.nan, math.nan)), "reproduced", "on stand-in"),
        (rows_of(1.3, 1.4).drop(columns="waited_share"), "reproduced", "on stand-in"),
    ],
)
def test_verdicts(rows, verdict, reason):
    (claim,) = speedup_claims(rows, "cpu")
    assert claim["verdict"] == verdict
    assert reason in claim["reason"]


def test_committed_measurements_are_read_as_they_were():
    """Those of before waiting was recorded give the numbers that were committed with them."""
    folder = Path(__file__).parent.parent / "data" / "results" / "fig_speedup" / "cpu-int8"
    committed = pd.read_csv(folder / "fig_speedup.csv")
    table = speedups(pd.read_csv(folder / "measurements.csv"))
    pd.testing.assert_frame_equal(table[committed.columns[:8]], committed[committed.columns[:8]])


def test_disturbed_measurements_are_told(stand_in, monkeypatch):
    """From the clock that waits are counted with to the line that says what to do."""
    seconds = iter((0.0, 10.0, 0.0, 0.0))
    monkeypatch.setattr("qurl.benchmark.longest_wait", lambda before, after: next(seconds))
    lines = []
    rows = measure_rollout(
        "tiny", "int8", batch_sizes=[2], max_tokens=11, repeats=2, baselines=("bf16",), report=lines.append
    )
    assert (rows["waited_share"] > DISTURBED).tolist() == [False, True, False, False]
    assert lines[-1].startswith("Other jobs disturbed 1 of 4 measurements, which waited up to ")
    assert lines[-1].endswith("for a core: run it again on an idle machine.")


def test_vllm_as_it_comes_is_the_first_baseline_on_a_cpu(stand_in, monkeypatch):
    """What one would run without qurl is measured too, and the paper's claim is judged against it."""
    monkeypatch.setitem(STEP, "bf16", {2: 0.010, 4: 0.040})
    rows = measure_rollout("tiny", "int8", batch_sizes=(4,), max_tokens=11, repeats=1)
    starts = [call[1:] for call in stand_in.calls if call[0] == "start"]
    assert starts == [("bf16", "vllm"), ("bf16", "qurl"), ("fp32", "qurl"), ("int8", "qurl")]
    assert set(rows["dtype"]) == {"vllm-bf16", "bf16", "fp32", "int8"}
    # Bars and rows in the same order.
    assert list(dict.fromkeys(speedups(rows)["baseline"])) == ["vllm-bf16", "bf16", "fp32"]
    claims = speedup_claims(rows, "cpu")
    assert [claim["ours"].split(" (")[0] for claim in claims] == [
        "2.00 times bf16",
        "2.00 times vllm-bf16",
        "1.62 times fp32",
    ]
