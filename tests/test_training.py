"""Training with a real engine: weights in it, prompts, adapters, faults, trackers, and whole runs."""

import json
import logging
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from qurl.config import QuRLConfig
from qurl.diagnostics import METRICS, history
from qurl.models import resolve_model
from qurl.quantization import quantized_named_tensors
from qurl.rollout import RolloutError
from qurl.tasks import load_task
from qurl.trainer import QuRLTrainer
from qurl.training import TINY_DEFAULTS, RunArguments, alone, train

pytest.importorskip("vllm")

SMALL = TINY_DEFAULTS | {
    "max_steps": 4, "per_device_train_batch_size": 16, "steps_per_generation": 2, "save_strategy": "no",
    "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture
def trainer_of(tmp_path):
    made = []

    def make(model=None, *, data=None, trainer=QuRLTrainer, peft_config=None, eval_dataset=None, **options):
        task = data or load_task("arithmetic", "train", n=64)
        config = QuRLConfig(**{**SMALL, "output_dir": str(tmp_path), **options})
        made.append(
            trainer(
                model or "tiny", task.reward_functions(), config, train_dataset=task.dataset,
                eval_dataset=eval_dataset, peft_config=peft_config,
            )
        )  # fmt: skip
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def engine_of(trainer):
    return trainer.vllm_generation._engine(trainer.vllm_generation.train_dtype)


def assert_engine_holds(trainer, model):
    """Codes and scales of the live engine are those of the model's weights, bit for bit."""
    engine = engine_of(trainer)
    tensors = dict(quantized_named_tensors(model.named_parameters(), engine.dtype, engine.code_bits))
    compared = 0
    for name, tensor in tensors.items():
        if name + "_scale" in tensors:
            codes, scale = engine.codes_and_scale(name)
            assert torch.equal(codes.view(torch.uint8), tensor.view(torch.uint8)), name
            assert torch.equal(scale, tensors[name + "_scale"].float()), name
            compared += 1
    assert compared == 28  # seven projections in each of four layers


@pytest.mark.parametrize(
    "options", [{"rollout_dtype": "int8"}, {"rollout_dtype": "fp8"}, {"rollout_code_bits": 4}]
)
def test_training_moves_the_policy_and_the_engine_follows(trainer_of, options):
    trainer = trainer_of(
        update_noise_every=1,
        attribute_mismatch_every=1,
        dynamic_sampling_max_rounds=1,
        learning_rate=1e-3,
        **options,
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert all(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    trainer.vllm_generation.sync_weights()
    assert_engine_holds(trainer, trainer.model)

    table = history(trainer)
    assert table.loc[[1, 3], "rollout/bits"].tolist() == [trainer.args.rollout_code_bits] * 2
    assert table.loc[1, "mismatch/staleness_k3"] == pytest.approx(0, abs=1e-9)
    assert table.loc[2, "mismatch/staleness_k3"] > 1e-6
    # Quantization and engine together make up the mismatch, and quantization is the larger part.
    assert table.loc[1, "attribution/quantization_k3"] > table.loc[1, "attribution/engine_k3"] > 0
    assert 0 < table.loc[3, "rollout/codes_changed"] == pytest.approx(table.loc[3, "update/codes_changed"])
    ours = {name for name in table if name.split("/")[0] in {name.split("/")[0] for name in METRICS}}
    assert ours == set(METRICS)


def test_mismatch_is_of_the_size_that_was_measured(trainer_of):
    """KL near 1e-4 in 8 bits (engine notes), far more with 3-bit codes, and less in BF16."""
    kl = {}
    for name, options in {
        "bf16": {"rollout_dtype": "bf16"},
        "int8": {},
        "int3": {"rollout_code_bits": 3},
    }.items():
        trainer = trainer_of(max_steps=1, num_iterations=2, per_device_train_batch_size=64, **options)
        trainer.train()
        kl[name] = history(trainer)["mismatch/kl_k3"].iloc[0]
        trainer.close()
    assert kl["bf16"] < kl["int8"] < 5e-3 < kl["int3"]


class WithoutSync(QuRLTrainer):
    """Looks at the engine when the first rollout is asked for."""

    first_codes = None

    def _generate_single_turn(self, *args, **options):
        generated = super()._generate_single_turn(*args, **options)
        if self.first_codes is None:
            self.first_codes = engine_of(self).codes_and_scale("model.layers.0.mlp.down_proj.weight")
        return generated


def test_case_e05_the_first_rollout_after_resuming_is_of_the_checkpoint(trainer_of, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    trainer_of(max_steps=2, **options).train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float32)
    resumed = trainer_of(max_steps=4, trainer=WithoutSync, **options)
    resumed.train(resume_from_checkpoint=True)
    expected = dict(quantized_named_tensors(saved.named_parameters(), "int8"))
    assert torch.equal(resumed.first_codes[0], expected["model.layers.0.mlp.down_proj.weight"])
    table = history(resumed)
    assert table.index.tolist() == [1, 2, 3, 4]


def test_a_run_that_was_stopped_equals_one_that_was_not(trainer_of, tmp_path):
    """With a real engine: the same random numbers, so the same completions, losses and weights."""
    options = {
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 9,
        "max_steps": 5,
        "learning_rate": 1e-3,
    }
    whole = trainer_of(output_dir=str(tmp_path / "whole"), **options)
    whole.train()
    for step in (2, 3):  # between two generation batches, and within one
        cut = trainer_of(output_dir=str(tmp_path / f"cut{step}"), **options)
        cut.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        columns = ["loss", "grad_norm", "reward", "mismatch/kl_k3"]
        pd.testing.assert_frame_equal(history(cut)[columns], history(whole)[columns])
        for mine, theirs in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_case_e06_engine_and_trainer_scale_by_the_temperature_alike(trainer_of):
    """The same softmax on both sides: a temperature on one side only would move w far from 1."""
    trainer = trainer_of(rollout_dtype="fp32", temperature=0.6, max_steps=1, num_iterations=2)
    trainer.train()
    row = history(trainer).iloc[0]
    assert row["mismatch/w_max"] == pytest.approx(1, abs=1e-3)
    assert row["mismatch/kl_k3"] < 1e-7


def test_case_e08_the_engine_gets_the_trainers_prompt_ids(trainer_of, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    trainer = trainer_of(max_steps=1, num_iterations=2)
    seen, engine = [], engine_of(trainer)
    generate = engine.generate
    monkeypatch.setattr(
        engine, "generate", lambda ids, **options: (seen.extend(ids), generate(ids, **options))[1]
    )
    batches = []
    score = trainer._generate_and_score_completions
    monkeypatch.setattr(
        trainer, "_generate_and_score_completions", lambda rows: (batches.append(score(rows)), batches[-1])[1]
    )
    trainer.train()
    rows = zip(batches[0]["prompt_ids"], batches[0]["prompt_mask"].bool(), strict=True)
    prompts = [ids[mask].tolist() for ids, mask in rows]
    assert prompts == [
        ids for ids in seen if len(ids) > 1
    ]  # the check after a sync decodes a token of its own
    for ids in prompts:
        assert ids.count(tokenizer.bos_token_id) <= 1
        assert tokenizer.decode(ids, skip_special_tokens=True).endswith("=")


def test_adapters_are_merged_for_the_engine_and_taken_out_again(trainer_of):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    trainer = trainer_of(peft_config=adapter, learning_rate=1e-2)
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "base_layer" in n}
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        if name in base:
            torch.testing.assert_close(parameter, base[name], rtol=0, atol=1e-6)
    trainer.vllm_generation.sync_weights()
    trainer.model.merge_adapter()
    merged = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): p
        for name, p in trainer.model.named_parameters()
        if "lora_" not in name
    }
    codes, _ = engine_of(trainer).codes_and_scale("model.layers.1.self_attn.q_proj.weight")
    expected = dict(quantized_named_tensors(merged.items(), "int8"))
    assert torch.equal(codes, expected["model.layers.1.self_attn.q_proj.weight"])


def test_after_a_failed_sync_adapters_are_out_and_the_engine_refuses(trainer_of):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    trainer = trainer_of(peft_config=adapter)
    trainer.vllm_generation.sync_weights()
    with torch.no_grad():
        trainer.model.base_model.model.model.layers[2].mlp.up_proj.weight[0, 0] = torch.nan
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        trainer.vllm_generation.sync_weights()
    assert not any(getattr(m, "merged_adapters", None) for m in trainer.model.modules())
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=0, atol=1e-6, equal_nan=True)
    with pytest.raises(RolloutError, match="last sync"):
        engine_of(trainer).generate([[5, 6, 7]])


def test_evaluation_in_full_precision_beside_quantized_training(trainer_of):
    task = load_task("arithmetic", "train", n=64)
    config = {
        "eval_rollout_dtype": "bf16",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 16,
    }
    trainer = trainer_of(eval_dataset=task.dataset.select(range(4)), **config)
    trainer.train()
    table = history(trainer)
    assert table["eval_rollout/bits"].dropna().tolist() == [16, 16]
    assert table["rollout/bits"].dropna().tolist() == [8, 8]
    assert table["eval_mismatch/kl_k3"].notna().sum() == 2


def test_full_precision_takes_over_after_an_alarm(trainer_of):
    trainer = trainer_of(
        rollout_code_bits=3, mismatch_limit=1e-3, mismatch_action="full_precision", max_steps=4
    )
    trainer.train()
    assert history(trainer)["rollout/bits"].dropna().tolist() == [3, 16]


def test_stock_transformers_reads_a_uaq_checkpoint(trainer_of, tmp_path):
    trainer = trainer_of(uaq_scale=1.5, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "policy"))
    ids = torch.tensor([[5, 6, 7, 8]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    torch.testing.assert_close(loaded(ids).logits, trainer.model(ids).logits, rtol=1e-5, atol=1e-5)


def test_tensorboard_receives_the_mismatch(trainer_of, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path / "board")
    try:
        trainer = trainer_of(report_to="tensorboard")
        trainer.train()
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    events = EventAccumulator(str(next((tmp_path / "board").rglob("events.*")).parent)).Reload()
    logged = [event.value for event in events.Scalars("train/mismatch/kl_k3")]
    assert logged == pytest.approx(history(trainer)["mismatch/kl_k3"].dropna().tolist(), rel=1e-5)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    options = SMALL | {"output_dir": str(folder), "save_strategy": "steps", "save_steps": 2, "max_steps": 20}
    run = RunArguments(task_options={"n": 500}, eval_options={"n": 200})
    return folder, run, options, train(run, QuRLConfig(**options | {"per_device_train_batch_size": 32}))


def test_a_run_leaves_its_folder_complete(finished_run):
    folder, _, _, result = finished_run
    assert result == json.loads((folder / "result.json").read_text())
    assert yaml.safe_load((folder / "config.yaml").read_text()) == result["run"]
    assert pd.read_csv(folder / "metrics.csv")["reward"].notna().sum() == 10
    for name in ("before", "after"):
        samples = pd.read_parquet(folder / f"samples-{name}" / "samples.parquet")
        assert len(samples) == 200 == result["accuracy"]["problems"]
        assert samples["correct"].mean() == pytest.approx(result["accuracy"][name]["mean"])
    accuracy = result["accuracy"]
    assert accuracy["gain"]["mean"] == pytest.approx(accuracy["after"]["mean"] - accuracy["before"]["mean"])
    AutoModelForCausalLM.from_pretrained(folder / "policy")


def test_a_finished_run_is_read_and_another_refused(finished_run, caplog):
    _, run, options, result = finished_run
    config = QuRLConfig(**options | {"per_device_train_batch_size": 32})
    with caplog.at_level(logging.INFO):
        assert train(run, config) == result
    assert "is finished" in caplog.text
    with pytest.raises(ValueError, match="holds a run with objective="):
        train(run, QuRLConfig(**options | {"per_device_train_batch_size": 32, "objective": "tis"}))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_resumes_from_the_command_line(tmp_path, number):
    command = [
        sys.executable, "-m", "qurl.cli", "train", "--output_dir", str(tmp_path / "run"), "--max_steps", "40",
        "--save_steps", "5", "--eval_k", "0", "--per_device_train_batch_size", "16", "--save_total_limit", "2",
    ]  # fmt: skip
    first = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # A shell's background job ignores Ctrl-C, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "run").glob("checkpoint-*/trainer_state.json")):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.killpg(first.pid, number)
        output = first.communicate(timeout=60)[0].decode()
    if number == signal.SIGINT:
        assert first.returncode == 130
        assert output.strip().endswith(
            "qurl train: stopped; the same command goes on from its last checkpoint."
        )
        assert "Traceback" not in output
    second = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert second.returncode == 0, second.stderr
    assert "Going on from" in second.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["resumed"] and result["steps"] == 40
    assert pd.read_csv(tmp_path / "run" / "metrics.csv")["step"].tolist() == list(range(1, 41))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--objective", "ppo"], "objective='ppo' is not possible"),
        (["--task_options", "digits=2"], "task_options='digits=2' is not possible: give a JSON object"),
        (["--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint='nowhere' is not possible"),
        (["--eval_temperature", "9"], "eval_temperature=9.0 is not possible: use "),
        (["--task", "chess"], "'chess' is not known"),
        (["--no_such_field", "1"], "no_such_field"),
        (["--learning_rate", "fast"], "learning_rate"),
    ],
)
def test_mistakes_on_the_command_line_end_in_one_sentence(tmp_path, options, sentence):
    command = [sys.executable, "-m", "qurl.cli", "train", "--output_dir", str(tmp_path / "run"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert sentence in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


# Stops before the engine starts ------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path, monkeypatch):
    """`train` of a task file, in which an engine is a failure."""

    def no_engine(*args, **options):
        raise AssertionError("the engine was started")

    monkeypatch.setattr("qurl.training.QuRLTrainer", no_engine)

    def start(problems, options=None, **run):
        file = tmp_path / "problems.jsonl"
        file.write_text("".join(json.dumps({"problem": p, "answer": "3"}) + "\n" for p in problems))
        task = {"task": str(file), "task_options": {"chat": False, "answer_format": "exact"}}
        config = QuRLConfig(**SMALL | {"output_dir": str(tmp_path / "run")} | (options or {}))
        return train(RunArguments(**task | {"eval_k": 0} | run), config)

    return start


def test_prompts_that_are_too_long_are_left_out_and_counted(start, caplog):
    """32 tokens of the engine, 8 of a completion: 24 are left for a prompt."""
    with pytest.raises(AssertionError, match="engine was started"):
        start(["1+2=", "1+2=" * 30])
    assert "1 of 2 prompts are longer than 24 tokens and left out." in caplog.text
    with pytest.raises(
        ValueError, match=r"leaves 24 tokens for a prompt .* every prompt of task 'problems' is longer"
    ):
        start(["1+2=" * 30])


def test_held_out_prompts_that_are_too_long_are_refused(start, tmp_path):
    sums = tmp_path / "long.jsonl"
    sums.write_text(json.dumps({"problem": "1+2=" * 30, "answer": "3"}) + "\n")
    options = {"chat": False, "answer_format": "exact"}
    with pytest.raises(
        ValueError, match="vllm_max_model_length=32 is too short for task 'long', whose longest"
    ):
        start(["1+2="], eval_k=1, eval_tasks=[str(sums)], eval_options=options)


def test_problems_that_are_trained_on_do_not_judge(start, tmp_path, caplog):
    """A file has no split: without other problems, what is called held-out accuracy would be that of training."""
    format_ = {"chat": False, "answer_format": "exact"}
    with pytest.raises(ValueError, match=r"problems.jsonl' would judge .* trained on: give .* --eval_tasks"):
        start(["1+2=", "2+1="], eval_k=1)
    copy = tmp_path / "copy.jsonl"
    copy.write_text(json.dumps({"problem": " 1+2=", "answer": "3"}) + "\n")
    with pytest.raises(ValueError, match="eval_tasks='copy' would judge"):
        start(["1+2=", "2+1="], eval_k=1, eval_tasks=[str(copy)], eval_options=format_)
    with open(copy, "a") as file:
        file.write(json.dumps({"problem": "0+3=", "answer": "3"}) + "\n")
    with pytest.raises(AssertionError, match="engine was started"):
        start(["1+2=", "2+1="], eval_k=1, eval_tasks=[str(copy)], eval_options=format_)
    assert "1 of the 2 held-out problems of copy are trained on." in caplog.text


def test_a_task_without_a_test_split_needs_problems_that_judge(start, tmp_path):
    """Also where one file is the data of both splits."""
    with pytest.raises(ValueError, match=r"task='deepscaler' has no test split .* --eval_tasks"):
        start(["1+2="], task="deepscaler", task_options={"data": "sample"}, eval_k=1)
    file = tmp_path / "both.jsonl"
    file.write_text(json.dumps({"question": "1+2=", "answer": "It is #### 3"}) + "\n")
    with pytest.raises(ValueError, match=r"task='gsm8k' would judge .* --eval_tasks"):
        start(["1+2="], task="gsm8k", task_options={"data": str(file)}, eval_k=1)


def test_a_failed_start_does_not_occupy_the_folder(start, tmp_path):
    for _ in range(2):
        with pytest.raises(AssertionError, match="engine was started"):
            start(["1+2="])
        assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("name", "content"), [("config.yaml", "a: ["), ("config.yaml", ""), ("result.json", "{")]
)
def test_damaged_files_of_a_run_are_named(start, tmp_path, name, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        start(["1+2="])


def test_a_run_in_a_held_folder_is_refused(start, tmp_path):
    with alone(tmp_path / "run"), pytest.raises(ValueError, match="is being trained by another process"):
        start(["1+2="])


def test_one_process_of_several_that_were_asked_for_does_not_train(tmp_path, monkeypatch):
    config = QuRLConfig(**SMALL | {"output_dir": str(tmp_path / "run")})
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match="has started one process, whatever --num_processes says"):
        train(RunArguments(), config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"split": "test"}, {"name": "gsm8k"}])
def test_task_options_that_are_no_options(options):
    with pytest.raises(ValueError, match="is no option of a task"):
        RunArguments(task_options=options)


def test_a_single_evaluation_task_may_be_a_text():
    assert RunArguments(eval_tasks="arithmetic").eval_tasks == ["arithmetic"]


def test_overlong_penalty_is_a_reward_of_its_own(tmp_path):
    """tiny ends its sums after 4 to 5 tokens: with a ramp over 6 of the 8 tokens each is penalized, by 1/3 or 1/2."""
    options = SMALL | {"output_dir": str(tmp_path / "run"), "max_steps": 2}
    run = RunArguments(task_options={"n": 200}, eval_k=0, overlong_buffer=6)
    train(run, QuRLConfig(**options))
    table = pd.read_csv(tmp_path / "run" / "metrics.csv")
    penalty = table["rewards/soft_overlong/mean"].dropna()
    length = table["completions/mean_length"].dropna()
    assert penalty.to_list() == pytest.approx((-(length - 2) / 6).to_list())
    assert table["reward"].dropna().to_list() == pytest.approx(
        (table["rewards/accuracy/mean"] + table["rewards/soft_overlong/mean"]).dropna().to_list()
    )
