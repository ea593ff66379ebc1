"""Trainers on recorded rollouts: everything but the engine is real."""

import warnings

import pytest
import torch
from replay import DATA, ReplayedQuRLTrainer, make_policy, reward_of_length
from transformers import AutoTokenizer

from qurl.config import QuRLConfig
from qurl.models import resolve_model


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices of 32 columns only lose time on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("tiny"))


@pytest.fixture(scope="module")
def policy_folder(tokenizer, tmp_path_factory):
    """On disk, since TRL loads the reference model from there."""
    folder = tmp_path_factory.mktemp("policy")
    make_policy(tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make_trainer(tokenizer, policy_folder, tmp_path):
    def make(
        trainer=ReplayedQuRLTrainer,
        config=QuRLConfig,
        rewards=reward_of_length,
        model=None,
        data=DATA,
        eval_data=None,
        peft_config=None,
        **options,
    ):
        defaults = {
            "output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 8, "num_generations": 4,
            "max_completion_length": 8, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "bf16": False,
            "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
            "disable_tqdm": True, "use_cpu": True,
        }  # fmt: skip
        args = config(**{**defaults, **options})
        model = policy_folder if model is None else model
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="objective='acr' equals 'tis'")
            return trainer(
                model,
                rewards,
                args,
                train_dataset=data,
                eval_dataset=eval_data,
                processing_class=tokenizer,
                peft_config=peft_config,
            )

    return make
