"""Two training processes on a CPU (gloo): their collectives match, and both take the same step."""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

# Processes that hang end by themselves before that, and say where they were.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def ranks(policy_folder, tmp_path_factory):
    """What two_processes.py reports from each process."""
    folder = tmp_path_factory.mktemp("ranks")
    # --standalone picks a free port; --master_port=0 would be taken literally, and waited for.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = str(Path(__file__).with_name("two_processes.py"))
    done = subprocess.run([*launcher, script, policy_folder, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_both_processes_take_the_same_step(ranks):
    assert [rank["processes"] for rank in ranks] == [2, 2]
    (before, after), other = (rank["weights"] for rank in ranks)
    assert other == [before, after]
    assert before != after


def test_every_group_teaches_something_and_no_prompt_comes_twice(ranks):
    assert all("+22=" in prompt for rank in ranks for prompt in rank["rewarded"])
    assert all(advantage != 0 for rank in ranks for advantage in rank["advantages"])
    kept = [prompt for rank in ranks for prompt in rank["rewarded"][::4]]
    assert len(set(kept)) == len(kept) == 4
    drawn = [prompt for rank in ranks for prompts in rank["drawn"] for prompt in prompts[::4]]
    assert len(set(drawn)) == len(drawn) > 4


def test_loss_is_divided_by_the_tokens_of_both_processes_after_replacing(ranks):
    tokens = [rank["tokens"] for rank in ranks]
    assert tokens[0] != tokens[1]
    assert [rank["num_items_in_batch"] for rank in ranks] == [sum(tokens)] * 2


def test_metrics_count_both_processes(ranks):
    metrics = [rank["metrics"] for rank in ranks]
    extra = [len(list(chain(*rank["drawn"][1:]))) for rank in ranks]
    assert extra[0] == extra[1]  # or one of them would wait for the other's rewards for ever
    for own in metrics:
        assert own["dynamic_sampling/extra_completions"] == sum(extra)
        assert own["dynamic_sampling/rounds"] == len(ranks[0]["drawn"]) - 1
        assert own["dynamic_sampling/equal_groups_left"] == 0
    of_time = ("seconds", "step_time", "per_second", "sync_share", "runtime")
    assert {k: v for k, v in metrics[0].items() if not k.endswith(of_time)} == {
        k: v for k, v in metrics[1].items() if not k.endswith(of_time)
    }
