"""What all tests share: the tiers, and the read-only material that lies beside a checkout.

Three tiers: unmarked tests run in `make test`; `slow` ones (minutes) only in `make test-full`; `gpu` ones are
skipped on a machine without a GPU.
"""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items):
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data sets that lies beside the checkout where the project is developed."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder shared/ beside the checkout")
    return folder


@pytest.fixture(scope="session")
def finish_run():
    """``finish_run(store, spec, ...)`` leaves a finished run with the files of `qurl.training.train`."""
    import pandas as pd

    def finish(store, spec, *, after: float = 0.5, kl=(0.01, 0.02), steps: int = 20) -> None:
        folder = store.folder(spec)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
        growth = [kl[0] if step < steps / 2 else kl[1] for step in range(steps)]
        table = pd.DataFrame(
            {"reward": 0.4, "mismatch/kl_k3": growth, "mismatch/w_max": 3.0, "clip_ratio/region_mean": 0.01},
            index=pd.RangeIndex(1, steps + 1, name="step"),
        )
        table.to_csv(folder / "metrics.csv")
        accuracy = {"before": {"mean": 0.25}, "after": {"mean": after}, "gain": {"mean": after - 0.25}}
        result = {"accuracy": accuracy, "steps": steps, "seconds": 60.0}
        (folder / "result.json").write_text(json.dumps(result))

    return finish
