"""One run of an experiment: the parameters of ``pipelines/train.ipynb``, and what follows from them."""

import dataclasses
import json
import re
from typing import Any, Literal

import pydantic

from qurl.config import QuRLConfig
from qurl.experiments.recipes import GPUS, recipe
from qurl.notebook import Parameters
from qurl.training import RunArguments

_RUN_FIELDS = set(RunArguments.__dataclass_fields__)
_NAME = re.compile(
    r"(?P<preset>\w+)-(?P<dtype>bf16|int8|fp8)(?:-(?P<code_bits>\d)bit)?-(?P<objective>[a-z]+)"
    r"(?:-uaq(?P<uaq_scale>[\d.e+-]+?)(?P<rates>rates)?)?(?:-lr(?P<learning_rate_factor>[\d.e+-]+)x)?"
    r"(?:-(?P<steps>\d+)steps)?-seed(?P<seed>\d+)"
)


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
            parts.append(f"uaq{_text(self.uaq_scale)}" + ("rates" if self.uaq_mode != "fold" else ""))
        if self.learning_rate_factor != 1:
            parts.append(f"lr{_text(self.learning_rate_factor)}x")
        if self.steps:
            parts.append(f"{self.steps}steps")
        return "-".join([*parts, f"seed{self.seed}"])

    @classmethod
    def from_name(cls, experiment: str, name: str) -> "RunSpec":
        """The run that is kept under ``name``; ValueError if that is no name of a run."""
        if not (found := _NAME.fullmatch(name)):
            raise ValueError(f"{name!r} is no name of a run")
        values = {key: value for key, value in found.groupdict().items() if value is not None}
        mode = {"uaq_mode": "learning_rates"} if values.pop("rates", None) else {}
        spec = cls(experiment=experiment, **values, **mode)
        if spec.name != name:
            raise ValueError(f"{name!r} is no name of a run, but {spec.name!r} would be")
        return spec

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

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps on one batch of rollouts."""
        values = self.fields()
        return values["steps_per_generation"] // values["gradient_accumulation_steps"]

    def difference(self, recorded: dict[str, Any]) -> str | None:
        """In which setting a kept run is not this one, in words: recipes change; None where it is.

        Parameters
        ----------
        recorded : dict
            ``run`` of the run's ``result.json``: every field of `RunArguments`, and those of `QuRLConfig` that are not
            at their defaults.
        """
        fields = [field for kind in (RunArguments, QuRLConfig) for field in dataclasses.fields(kind)]
        defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
        usual = defaults | {"processes": 1}
        wanted = usual | self.fields() | {"processes": GPUS if self.preset == "paper" else 1}
        for name in sorted((recorded.keys() | self.fields().keys() | {"processes"}) - _NOT_RECORDED):
            there, value = recorded.get(name, usual.get(name)), wanted.get(name)
            if there != value and (there or value):  # an option that is not set is None, {} or []
                return f"{name}={there!r}, where the recipe has {value!r}"
        return None

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


# Where a run reports does not make it another one; accelerate's own settings are derived.
_NOT_RECORDED = {"report_to", "accelerator_config"}


def _text(number: float) -> str:
    """As short as it can be without being another number's."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _word(value) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


class TrainConfig(RunSpec):
    """Parameters of ``pipelines/train.ipynb``: a run, and the store that keeps it."""

    runs_dir: str = pydantic.Field("", examples=["runs"])

    @pydantic.field_validator("preset")
    @classmethod
    def _of_one_process(cls, preset: str) -> str:
        if preset == "paper":
            raise ValueError(
                f"counts its batches on {GPUS} processes, and a notebook is one; qurl reproduce --preset paper "
                "--dry-run shows the commands for accelerate"
            )
        return preset

    @property
    def spec(self) -> RunSpec:
        """The run without its place."""
        return RunSpec(**self.model_dump(exclude={"runs_dir"}))
