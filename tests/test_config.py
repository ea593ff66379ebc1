"""`QuRLConfig`: what it adds to TRL's configuration, and what it refuses."""

import dataclasses
import math
import re

import numpy as np
import pytest
from trl import GRPOConfig

from qurl.config import QuRLConfig


@pytest.fixture
def config(tmp_path):
    def make(**options):
        return QuRLConfig(output_dir=str(tmp_path), bf16=False, report_to="none", **options)

    return make


def test_every_field_of_trl_is_there_with_few_other_defaults():
    ours = {field.name: field.default for field in dataclasses.fields(QuRLConfig)}
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    assert theirs.keys() <= ours.keys()
    assert {name for name in theirs if ours[name] != theirs[name]} == {
        "use_vllm",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
        "use_bias_correction_kl",
        "vllm_server_host",
    }


def test_docstring_and_help_name_every_added_field():
    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    for field in dataclasses.fields(QuRLConfig):
        if field.name not in theirs:
            assert re.search(rf"^\s+{field.name} \(`", QuRLConfig.__doc__, re.MULTILINE), field.name
            assert field.metadata["help"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rollout_dtype": "int4"}, "rollout_dtype='int4'"),
        ({"objective": "ppo"}, "objective='ppo'"),
        ({"proximal_logps": True}, "proximal_logps=True"),
        ({"rollout_code_bits": 1}, "rollout_code_bits=1"),
        ({"rollout_code_bits": 4, "rollout_dtype": "fp8"}, "rollout_code_bits=4"),
        ({"uaq_scale": 0.0}, "uaq_scale=0.0"),
        ({"uaq_scale": float("nan")}, "uaq_scale=nan"),
        ({"uaq_scale": "1.5"}, "uaq_scale='1.5'"),
        ({"uaq_scale": True}, "uaq_scale=True"),
        ({"uaq_scale": float("inf")}, "uaq_scale=inf"),
        ({"update_noise_every": -1}, "update_noise_every=-1"),
        ({"update_noise_every": 1.0}, "update_noise_every=1.0"),
        ({"attribute_mismatch_every": "4"}, "attribute_mismatch_every='4'"),
        ({"dynamic_sampling_max_rounds": None}, "dynamic_sampling_max_rounds=None"),
        ({"sync_check": "no"}, "sync_check='no'"),
        ({"rollout_dtype": ["int8"]}, "rollout_dtype=['int8']"),
        ({"mismatch_limit": "0.1"}, "mismatch_limit='0.1'"),
        ({"mismatch_limit": True}, "mismatch_limit=True"),
        ({"mismatch_limit": -0.1}, "mismatch_limit=-0.1"),
        ({"mismatch_action": "halt"}, "mismatch_action='halt'"),
        ({"use_vllm": False}, "use_vllm=False"),
        ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction=False"),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, "vllm_importance_sampling_mode="),
        ({"vllm_importance_sampling_clip_min": 0.5}, "vllm_importance_sampling_clip_min=0.5"),
        ({"vllm_importance_sampling_clip_max": None}, "vllm_importance_sampling_clip_max=None"),
        ({"vllm_importance_sampling_clip_max": 0.0}, "vllm_importance_sampling_clip_max=0.0"),
        ({"vllm_importance_sampling_clip_max": "2"}, "vllm_importance_sampling_clip_max='2'"),
        ({"vllm_importance_sampling_cap": -1.0}, "vllm_importance_sampling_cap=-1.0"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'"),
        ({"delta": 4.0}, "delta=4.0"),
        ({"loss_type": "cispo"}, "loss_type='cispo'"),
        ({"loss_type": "sapo"}, "loss_type='sapo'"),
        ({"loss_type": "vespo"}, "loss_type='vespo'"),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
            "importance_sampling_level='sequence'",
        ),
        (
            {"proximal_logps": "reuse", "steps_per_generation": 4, "gradient_accumulation_steps": 2},
            "proximal_logps",
        ),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 20}, "top_k=20"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex"),
        ({"generation_kwargs": {"presence_penalty": 1.0}}, "generation_kwargs"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"fp16": True}, "fp16=True"),
        ({"vllm_mode": "remote"}, "vllm_mode='remote'"),
        ({"vllm_mode": "server", "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
        ({"vllm_mode": "server", "mismatch_action": "full_precision"}, "mismatch_action='full_precision'"),
        ({"vllm_server_base_url": "localhost:8000"}, "vllm_server_base_url='localhost:8000'"),
        *(
            ({"vllm_server_base_url": value}, f"vllm_server_base_url={value!r}")
            for value in (
                "http://a/v1",
                "http://me:secret@a",
                "http://a?x",
                "http://a:999999",
                "http://:8000",
                "",
                8,
            )
        ),
        *(
            ({"vllm_server_host": value}, f"vllm_server_host={value!r}")
            for value in ("http://127.0.0.1", "127.0.0.1:8000", "", None)
        ),
        ({"warmup_steps": 4, "lr_scheduler_type": "constant"}, "warmup_steps=4"),
        ({"rollout_timeout": math.inf}, "rollout_timeout=inf"),
        ({"vllm_server_timeout": math.nan}, "vllm_server_timeout=nan"),
        ({"vllm_server_port": 0}, "vllm_server_port=0"),
        ({"rollout_transfer": "mpi"}, "rollout_transfer='mpi'"),
        ({"rollout_timeout": 0}, "rollout_timeout=0"),
        ({"vllm_tensor_parallel_size": 0}, "vllm_tensor_parallel_size=0"),
        ({"vllm_tensor_parallel_size": 2, "attribute_mismatch_every": 1}, "attribute_mismatch_every=1"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True"),
        ({"vllm_max_model_length": 256, "max_completion_length": 256}, "vllm_max_model_length=256"),
        ({"max_completion_length": None}, "max_completion_length=None"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"max_steps": -2}, "max_steps=-2"),
        ({"max_steps": 4.0}, "max_steps=4.0"),
        ({"max_steps": -1.0}, "max_steps=-1.0"),
        ({"max_steps": True}, "max_steps=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, f"seed={2**32}"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"data_seed": -1}, "data_seed=-1"),
        ({"loss_type": "ppo"}, "loss_type='ppo'"),
        ({"importance_sampling_level": "sentence"}, "importance_sampling_level='sentence'"),
        ({"scale_rewards": "groups"}, "scale_rewards='groups'"),
        ({"scale_rewards": 1}, "scale_rewards=1"),
        ({"multi_objective_aggregation": "sum"}, "multi_objective_aggregation='sum'"),
        ({"reward_weights": [1.0, math.nan]}, "reward_weights=[1.0, nan]"),
        ({"reward_weights": [math.inf]}, "reward_weights=[inf]"),
        ({"reward_weights": ["1"]}, "reward_weights=['1']"),
        ({"reward_weights": 1.0}, "reward_weights=1.0"),
        ({"reward_weights": []}, "reward_weights=[]"),
        ({"num_generations": 1}, "num_generations=1"),
        *(
            ({name: value}, f"{name}={value!r}")
            for name in (
                "num_generations",
                "steps_per_generation",
                "num_iterations",
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
                "max_completion_length",
                "generation_batch_size",
            )
            for value in (0, -8, 8.0, True, "8")
        ),
        *(
            ({name: value}, f"{name}={value!r}")
            for name in (
                "learning_rate",
                "weight_decay",
                "warmup_steps",
                "max_grad_norm",
                "epsilon",
                "epsilon_high",
                "beta",
                "delta",
                "num_train_epochs",
                "top_entropy_quantile",
                "adam_beta2",
            )
            for value in (math.nan, math.inf, -0.1, "0.1", True)
        ),
        ({"adam_beta1": 1.0}, "adam_beta1=1.0"),
        ({"top_entropy_quantile": 1.1}, "top_entropy_quantile=1.1"),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_field_and_one_sentence(config, options, named):
    with pytest.raises(ValueError, match=re.escape(named)) as refusal:
        config(**options)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith(".")


def test_trls_old_name_for_c_is_as_good_as_the_new_one(config):
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_cap"):
        made = config(vllm_importance_sampling_cap=1.5, vllm_importance_sampling_clip_max=None)
    assert made.vllm_importance_sampling_clip_max == 1.5


def test_weights_without_a_limit_still_need_one_to_be_counted_by(config):
    with pytest.raises(
        ValueError, match=r"use a positive number, such as 2\.0, above which objective='decoupled'"
    ):
        config(objective="decoupled", vllm_importance_sampling_clip_max=None)
    config(objective="decoupled")


def test_numbers_of_numpy_become_pythons(config):
    made = config(uaq_scale=np.float32(1.5), update_noise_every=np.int64(2), mismatch_limit=1)
    assert (type(made.uaq_scale), type(made.update_noise_every), type(made.mismatch_limit)) == (
        float,
        int,
        float,
    )


def test_limits_are_possible_themselves(config):
    """A run without learning or clipping of the gradient is a control, and a weight of a reward may be negative."""
    made = config(
        learning_rate=0,
        max_grad_norm=0.0,
        epsilon=0,
        reward_weights=[1, -0.5],
        max_steps=-1,
        seed=2**32 - 1,
        num_generations=np.int64(2),
        scale_rewards=False,
        top_entropy_quantile=0,
    )
    assert (type(made.learning_rate), type(made.num_generations)) == (float, int)
    assert made.scale_rewards == "none"


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
@pytest.mark.parametrize("objective", ["naive", "proximal", "decoupled", "tis", "acr"])
def test_every_objective_goes_with_every_clipped_loss(config, objective, loss_type):
    assert (
        config(objective=objective, loss_type=loss_type, beta=1e-3, epsilon_high=0.28).objective == objective
    )


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_losses_without_clipping_go_with_the_other_corrections(config, loss_type):
    config(objective="tis", loss_type=loss_type)


@pytest.mark.parametrize(
    ("accumulation", "per_generation", "iterations", "steps", "current"),
    [
        (1, 1, 1, 1, True),
        (4, 4, 1, 1, True),
        (4, 2, 1, 0.5, True),
        (2, 4, 1, 2, False),
        (1, 1, 2, 2, False),
        (2, 1, 2, 1, True),
    ],
)
def test_optimizer_steps_per_generation_batch(
    config, accumulation, per_generation, iterations, steps, current
):
    """The policy is current where accumulation steps are a multiple of steps per generation times iterations."""
    made = config(
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        num_iterations=iterations,
    )
    assert made.optimizer_steps_per_batch == steps
    assert made.proximal_is_current is current


def test_addresses_of_servers():
    for name, values in (
        ("vllm_server_base_url", ("http://127.0.0.1:8000", "https://node-1.local", "http://[::1]:8000/")),
        ("vllm_server_host", ("127.0.0.1", "node-1.local", "::1", "fe80::2")),
    ):
        for value in values:
            assert getattr(QuRLConfig(vllm_mode="server", **{name: value}), name) == value


def test_processes_do_not_give_up_before_a_server_counts_as_hanging(monkeypatch):
    monkeypatch.setattr(QuRLConfig, "world_size", 2)
    QuRLConfig(vllm_mode="server")  # the defaults go together
    with pytest.raises(ValueError, match="rollout_timeout=1200 is too long for ddp_timeout=1800"):
        QuRLConfig(vllm_mode="server", rollout_timeout=1200)
