"""One run of an experiment: the parameters of ``pipelines/train.ipynb``, and what follows from them."""

import json
from typing import Literal

import pydantic

from qurl.config import QuRLConfig
from qurl.experiments.recipes import recipe
from qurl.notebook import Parameters
from qurl.training import RunArguments

_RUN_FIELDS = set(RunArguments.__dataclass_fields__)


class RunSpec(Parameters):
    """A run of the matrix. Two runs are the same run exactly where all of this is equal.

    Attributes
    ----------
    experiment : {"gsm8k", "dapo", "deepscaler"}
    preset : {"smoke", "cpu", "paper"}
    dtype : {"bf16", "int8", "fp8"}
        Of the rollouts.
    code_bits : int
        Below 8: the stress setting, INT8 only.
    objective : {"naive", "proximal", "decoupled", "tis", "acr"}
    uaq_scale : float
        s of update-aware quantization; 1 is off.
    uaq_mode : {"fold", "learning_rates"}
        The latter is UAQ's control arm.
    learning_rate_factor : float
        Times the recipe's learning rate (Table 4).
    steps : int
        Optimizer steps; 0: the recipe's.
    seed : int
    """

    experiment: Literal["gsm8k", "dapo", "deepscaler"] = pydantic.Field(examples=["dapo"])
    preset: Literal["smoke", "cpu", "paper"] = pydantic.Field("cpu", examples=["cpu"])
    dtype: Literal["bf16", "int8", "fp8"] = pydantic.Field("int8", examples=["int8"])
    code_bits: int = pydantic.Field(8, ge=2, le=8, examples=[8])
    objective: Literal["naive", "proximal", "decoupled", "tis", "acr"] = pydantic.Field(
        "acr", examples=["acr"]
    )
    uaq_scale: float = pydantic.Field(1.0, gt=0, allow_inf_nan=False, examples=[1.5])
    uaq_mode: Literal["fold", "learning_rates"] = pydantic.Field("fold", examples=["fold"])
    learning_rate_factor: float = pydantic.Field(1.0, gt=0, allow_inf_nan=False, examples=[1.5])
    steps: int = pydantic.Field(0, ge=0, examples=[1000])
    seed: int = pydantic.Field(0, ge=0, lt=2**32, examples=[0])

    @pydantic.model_validator(mode="after")
    def _possible(self):
        if self.code_bits != 8 and self.dtype != "int8":
            raise ValueError(
                f"code_bits={self.code_bits} needs dtype='int8', not {self.dtype!r}: leave code_bits out"
            )
        if self.uaq_mode != "fold" and self.uaq_scale == 1:
            raise ValueError("uaq_mode='learning_rates' needs a uaq_scale other than 1, such as 1.5")
        return self

    @property
    def name(self) -> str:
        """Folder of the run below its experiment's: the parameters, those at their defaults left out."""
        parts = [self.preset, self.dtype]
        if self.code_bits != 8:
            parts.append(f"{self.code_bits}bit")
        parts.append(self.objective)
        if self.uaq_scale != 1:
            parts.append(f"uaq{self.uaq_scale:g}" + ("rates" if self.uaq_mode != "fold" else ""))
        if self.learning_rate_factor != 1:
            parts.append(f"lr{self.learning_rate_factor:g}x")
        if self.steps:
            parts.append(f"{self.steps}steps")
        return "-".join([*parts, f"seed{self.seed}"])

    def fields(self) -> dict:
        """Every field that this run sets, of both dataclasses: the recipe's, then the run's own."""
        values = {name: choice.value for name, choice in recipe(self.experiment, self.preset).items()}
        values |= {
            "rollout_dtype": self.dtype,
            "rollout_code_bits": self.code_bits,
            "objective": self.objective,
            "uaq_scale": self.uaq_scale,
            "uaq_mode": self.uaq_mode,
            "learning_rate": values["learning_rate"] * self.learning_rate_factor,
            "seed": self.seed,
        }
        return values | ({"max_steps": self.steps} if self.steps else {})

    def arguments(self, output_dir) -> tuple[RunArguments, QuRLConfig]:
        """What `qurl.training.train` takes; ValueError for what is not possible together."""
        values = self.fields()
        run = RunArguments(**{name: value for name, value in values.items() if name in _RUN_FIELDS})
        config = {name: value for name, value in values.items() if name not in _RUN_FIELDS}
        return run, QuRLConfig(output_dir=str(output_dir), disable_tqdm=True, **config)

    def command(self, output_dir) -> list[str]:
        """``qurl train`` with the same fields, for a shell or behind ``accelerate launch``."""
        words = ["qurl", "train", "--output_dir", str(output_dir)]
        for name, value in self.fields().items():
            if value == [] or value is None:
                continue
            words.append(f"--{name}")
            words += value if isinstance(value, list) else [_word(value)]
        return words


def _word(value) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


class TrainConfig(RunSpec):
    """Parameters of ``pipelines/train.ipynb``: a run, and the store that keeps it."""

    runs_dir: str = pydantic.Field("", examples=["runs"])

    @property
    def spec(self) -> RunSpec:
        """The run without its place."""
        return RunSpec(**self.model_dump(exclude={"runs_dir"}))
