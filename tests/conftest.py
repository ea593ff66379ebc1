"""What all tests share: the tiers, and the read-only material that lies beside a checkout.

Three tiers: unmarked tests run in `make test`; `slow` ones (minutes) only in `make test-full`; `gpu` ones are
skipped on a machine without a GPU.
"""

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
