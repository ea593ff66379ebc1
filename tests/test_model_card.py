"""The model card names what a policy was trained with, and nothing that does not exist."""

import yaml

from qurl import QuRLConfig
from qurl.model_card import model_card


def head_and_body(card) -> tuple[dict, str]:
    _, head, body = str(card).split("---\n", 2)
    return yaml.safe_load(head), body


def test_settings_of_the_run(tmp_path):
    config = QuRLConfig(
        str(tmp_path), bf16=False, rollout_dtype="int8", rollout_code_bits=4, uaq_scale=1.5, seed=3
    )
    head, body = head_and_body(model_card("mine", config, base_model="Qwen/Qwen2.5-0.5B", tags=["qurl"]))
    assert head["base_model"] == "Qwen/Qwen2.5-0.5B" and head["tags"] == ["qurl"]
    assert "# mine\n" in body and "[Qwen/Qwen2.5-0.5B](https://huggingface.co/Qwen/Qwen2.5-0.5B)" in body
    assert "sampled in INT8, 4-bit codes, after" in body
    assert "| objective | `acr`:" in body and "| seed | 3 |" in body
    assert "| Update-Aware Quantization | s = 1.5 (fold) |" in body


def test_a_local_model_is_not_a_name_on_the_hub(tmp_path):
    head, body = head_and_body(model_card("mine", QuRLConfig(str(tmp_path), bf16=False, rollout_dtype="fp8")))
    assert "base_model" not in head and "None" not in body and "Update-Aware" not in body
    assert "A local model, trained with GRPO" in body and "sampled in FP8, after" in body
