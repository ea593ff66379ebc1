"""Two training processes on a CPU (gloo): their collectives match, and together they do what one process does.

Everything but vLLM is real; `tests/test_distributed.py` has runs with engines.
"""

import json
import math
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from fake_engine import FakeEngine

pytest.importorskip("peft")
import two_processes as in_one_process

# Processes that hang end by themselves before that, and say where they were.
pytestmark = pytest.mark.timeout(120)
OF_TIME = ("seconds", "step_time", "per_second", "sync_share", "runtime")
# Means of each process's mean in TRL; `mismatch/w_mean` is the mean over all tokens.
MEANS_OF_MEANS = ("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean")


@pytest.fixture(scope="module")
def engine_without_vllm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qurl.rollout.generation.CountingEngine", FakeEngine)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(policy_folder, folder, engine_without_vllm):
    """What two_processes.py reports from each process."""
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    in_one_process.trainer_with_engine(policy_folder, folder / "one", **options).train()
    # --standalone picks a free port; --master_port=0 would be taken literally, and waited for.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = str(Path(__file__).with_name("two_processes.py"))
    arguments = [policy_folder, str(folder), str(folder / "one" / "checkpoint-1")]
    done = subprocess.run([*launcher, script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def dynamic(ranks):
    return [rank["dynamic"] for rank in ranks]


def test_both_processes_take_the_same_step(dynamic):
    assert [rank["processes"] for rank in dynamic] == [2, 2]
    (before, after), other = (rank["weights"] for rank in dynamic)
    assert other == [before, after]
    assert before != after


def test_every_group_teaches_something_and_no_prompt_comes_twice(dynamic):
    assert all("+22=" in prompt for rank in dynamic for prompt in rank["rewarded"])
    assert all(advantage != 0 for rank in dynamic for advantage in rank["advantages"])
    kept = [prompt for rank in dynamic for prompt in rank["rewarded"][::4]]
    assert len(set(kept)) == len(kept) == 4
    drawn = [prompt for rank in dynamic for prompts in rank["drawn"] for prompt in prompts[::4]]
    assert len(set(drawn)) == len(drawn) > 4


def test_loss_is_divided_by_the_tokens_of_both_processes_after_replacing(dynamic):
    tokens = [rank["tokens"] for rank in dynamic]
    assert tokens[0] != tokens[1]
    assert [rank["num_items_in_batch"] for rank in dynamic] == [sum(tokens)] * 2


def test_metrics_count_both_processes(dynamic):
    metrics = [rank["metrics"] for rank in dynamic]
    extra = [len(list(chain(*rank["drawn"][1:]))) for rank in dynamic]
    assert extra[0] == extra[1]  # or one of them would wait for the other's rewards for ever
    for own in metrics:
        assert own["dynamic_sampling/extra_completions"] == sum(extra)
        assert own["dynamic_sampling/rounds"] == len(dynamic[0]["drawn"]) - 1
        assert own["dynamic_sampling/equal_groups_left"] == 0
    assert {k: v for k, v in metrics[0].items() if not k.endswith(OF_TIME)} == {
        k: v for k, v in metrics[1].items() if not k.endswith(OF_TIME)
    }


@pytest.mark.parametrize("way", in_one_process.WAYS)
def test_two_processes_train_as_one_with_twice_the_batch(ranks, folder, policy_folder, tmp_path, way):
    """Completions of 2 to 8 tokens, so that a mean of the processes' means would show; w on both sides of C."""
    options = dict(in_one_process.WAYS[way])
    size = 2 * options.pop("per_device_train_batch_size", 8)
    one = in_one_process.train_on_the_same_tokens(policy_folder, tmp_path, size, **options)
    two = [torch.load(folder / f"rank{rank}.pt")[way] for rank in range(2)]
    assert [left + right for left, right in zip(*(rank["prompts"] for rank in two), strict=True)] == one[
        "prompts"
    ]
    for rank in two:
        assert len(rank["gradients"]) == rank["metrics"]["step"][-1] > 1
        largest = one["gradients"].abs().amax(1)
        assert ((rank["gradients"] - one["gradients"]).abs().amax(1) < 1e-5 * largest).all()
        assert torch.equal(rank["weights"], two[0]["weights"])

    mine, theirs = one["metrics"], two[0]["metrics"]
    assert mine.keys() == theirs.keys()
    assert max(mine["mismatch/w_max"]) > 2 and max(mine["mismatch/truncated_share"]) > 0
    parts = options.get("steps_per_generation", 1) > 1  # whose tokens are drawn in each process by itself
    for name in mine:
        of_parts = parts and name.startswith(("clip_ratio/", "mismatch/staleness"))
        if name in MEANS_OF_MEANS or name.endswith(OF_TIME[1:]) or of_parts:
            continue
        for left, right in zip(mine[name], theirs[name], strict=True):
            assert math.isclose(left, right, rel_tol=1e-4, abs_tol=1e-6) or (
                math.isnan(left) and math.isnan(right)
            ), name
    if not parts and len(mine["step"]) == 4:
        assert max(mine["clip_ratio/region_mean"]) > 0 and max(mine["mismatch/staleness_k3"]) > 0


def test_rollouts_are_as_fast_as_both_processes_together(ranks, folder):
    """Half a second in each, so the tokens of both over half a second."""
    for rank in range(2):
        metrics = torch.load(folder / f"rank{rank}.pt")["tis, reused"]["metrics"]
        assert metrics["rollout/seconds"] == [0.5, 0.5]
        lengths = [16 * mean for mean in metrics["completions/mean_length"]]
        assert metrics["rollout/tokens_per_second"] == pytest.approx(
            [2 * tokens for tokens in lengths], rel=1e-6
        )


def test_a_resumed_run_of_two_processes_goes_on_bit_for_bit(ranks):
    """At the end of a generation batch and within one."""
    whole = ranks[0]["resumed"]["0"]
    for rank in ranks:
        assert len(rank["resumed"]["0"]["held"]) == 3
        for step in ("2", "3"):
            resumed = rank["resumed"][step]
            assert resumed["weights"] == whole["weights"]
            assert json.dumps(resumed["logged"]) == json.dumps(whole["logged"])
            assert resumed["held"] == whole["held"][-len(resumed["held"]) :]


def test_case_e05_the_first_rollout_after_resuming_is_of_the_checkpoint_in_both(ranks):
    for rank in ranks:
        resumed = rank["resumed"]["2"]
        assert resumed["held"][0] == resumed["checkpoint"] != rank["resumed"]["0"]["held"][0]


def test_a_checkpoint_of_another_number_of_processes_is_refused(ranks, folder, policy_folder, tmp_path):
    sentence = "holds the rollouts of {} processes and not of {}: resume with as many, or start a new run"
    for rank in ranks:
        assert sentence.format(1, 2) in rank["refused"]
    of_two = folder / "from0" / "checkpoint-6"
    assert sentence.format(2, 1) in in_one_process.refuse_another_number(policy_folder, of_two, tmp_path)


def test_adapters_are_merged_for_the_engines_of_one_process_and_of_two(
    ranks, policy_folder, tmp_path, engine_without_vllm
):
    one = in_one_process.train_adapter(policy_folder, tmp_path)
    two = [rank["adapter"] for rank in ranks]
    assert two[0] == two[1]
    for report in (one, *two):
        before, after = report["base"]
        assert before == after
        assert report["engine"] == report["merged"]
        assert not report["still_merged"]
    assert one["base"] == two[0]["base"] and one["adapter"] != two[0]["adapter"]


@pytest.mark.parametrize("model", ["sharded", "sharded_adapter"])
def test_engines_of_a_model_sharded_by_fsdp2_hold_the_codes_of_the_whole_one(ranks, model):
    for report in (rank[model] for rank in ranks):
        assert report["own_share"] < 0.6 * report["all"]
        assert report["sharded"] == report["whole"]
        assert len(set(report["sharded"])) == 2  # the codes follow the optimizer step


@pytest.mark.parametrize("model", ["sharded", "sharded_adapter"])
def test_a_shard_that_is_not_finite_is_found_by_both_processes(ranks, model):
    (fine, spoiled), (also_fine, named) = (rank[model]["verdicts"] for rank in ranks)
    assert fine == also_fine == "finite"
    assert "is not finite after step 2" in spoiled and "is not finite after step 2" in named


def test_case_v04_each_sample_of_an_evaluation_is_drawn_once(ranks, folder):
    for problems, asked in (("16", [8, 8]), ("15", [8, 7]), ("1", [1, 0])):
        reports = [rank["evaluated"][problems] for rank in ranks]
        assert [report["asked"] for report in reports] == asked  # the second time it is read
        for report in reports:
            assert report["pairs"] == report["wanted"] and len(report["pairs"]) == 4 * int(problems)
            assert report["complete"] and report["same"]
        written = {
            file.name for file in (folder / "evaluations" / problems).iterdir() if file.name != ".lock"
        }
        assert written == {"result.json", "samples.parquet", "settings.json"}
