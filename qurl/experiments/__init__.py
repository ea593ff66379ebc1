"""The paper's experiments: recipes, runs and their store, the orchestrator, and the verdicts of figures and tables."""

from qurl.experiments.recipes import EXPERIMENTS, PRESETS, recipe, recipe_table
from qurl.experiments.specs import RunSpec, TrainConfig
from qurl.experiments.store import Run, RunStore

__all__ = ["EXPERIMENTS", "PRESETS", "Run", "RunSpec", "RunStore", "TrainConfig", "recipe", "recipe_table"]
