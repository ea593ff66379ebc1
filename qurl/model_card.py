"""The card that a trained policy carries to a model hub: what it was trained with, and whom to cite."""

import os
import re
from importlib.metadata import version

from huggingface_hub import ModelCard, ModelCardData

from qurl.config import QuRLConfig

_METHODS = {
    "naive": "no correction, ratios to the sampler's log-probs",
    "proximal": "no correction, ratios to the policy's own log-probs",
    "decoupled": "decoupled PPO",
    "tis": "decoupled PPO with truncated importance sampling",
    "acr": "decoupled PPO with truncated importance sampling and Adaptive Clipping Range",
}
_PACKAGES = ("qurl", "trl", "transformers", "torch")
_TEXT = """---
{{ card_data }}
---

# {{ model_name }}

{% if base_model %}[{{ base_model }}](https://huggingface.co/{{ base_model }}){% else %}A local model{% endif %}
{%- if dataset_name %} on {{ dataset_name }}{% endif %}, trained with GRPO in full precision on completions that vLLM
sampled in {{ rollouts }}, after [QuRL](https://arxiv.org/abs/2602.13953).

| | |
|---|---|
{% for name, value in settings.items() -%}
| {{ name }} | {{ value }} |
{% endfor %}
These are the full-precision weights: `transformers` loads them as any other model's.

Versions: {{ versions }}.

To cite: *QuRL: Efficient Reinforcement Learning with Quantized Rollout*, arXiv 2602.13953; *DeepSeekMath* (GRPO),
arXiv 2402.03300; von Werra et al., *TRL: Transformers Reinforcement Learning*, github.com/huggingface/trl.
"""


def hub_id(name_or_path: str) -> str | None:
    """Of a model by its name or its folder in the hub's cache; None for any other folder."""
    if cached := re.search(r"models--(.+)/snapshots/", f"{name_or_path}/"):
        return cached[1].replace("--", "/")
    return name_or_path if name_or_path and not os.path.isdir(name_or_path) else None


def model_card(
    model_name: str,
    config: QuRLConfig,
    *,
    base_model: str | None = None,
    dataset_name: str | None = None,
    tags: list[str] | None = None,
) -> ModelCard:
    """A model card of a policy trained by `qurl.QuRLTrainer`.

    Parameters
    ----------
    model_name : str
    config : QuRLConfig
    base_model : str, optional
        Hub id of the model it started from.
    dataset_name : str, optional
    tags : list of str, optional

    Returns
    -------
    huggingface_hub.ModelCard
    """
    rollouts = config.rollout_dtype.upper()
    if config.rollout_dtype == "int8" and config.rollout_code_bits != 8:
        rollouts += f", {config.rollout_code_bits}-bit codes"
    settings = {
        "objective": f"`{config.objective}`: {_METHODS[config.objective]}",
        "loss type": f"`{config.loss_type}`",
        "learning rate": f"{config.learning_rate:g}",
        "completions per prompt": config.num_generations,
        "sampling temperature": f"{config.temperature:g}",
        "seed": config.seed,
    }
    if config.uaq_scale != 1:
        settings["Update-Aware Quantization"] = f"s = {config.uaq_scale:g} ({config.uaq_mode})"
    data = ModelCardData(
        base_model=base_model,
        datasets=dataset_name,
        library_name="transformers",
        model_name=model_name,
        tags=tags,
    )
    return ModelCard.from_template(
        data,
        template_str=_TEXT,
        model_name=model_name,
        base_model=base_model,
        dataset_name=dataset_name,
        rollouts=rollouts,
        settings=settings,
        versions=", ".join(f"{package} {version(package)}" for package in _PACKAGES),
    )
