"""What holds for every test: CPU, no network, no state from outside, fixed seeds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from tests.stores import address, s3_server  # noqa: F401 - fixtures

# Set before anything imports jax or a Hugging Face library, which read them once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
for cache in ("POPXL_CACHE_DIR", "POPART_CACHE_DIR"):
    os.environ.pop(cache, None)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start the global generators anew for each test; tests' own generators name their seed."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for libraries that draw from it


@pytest.fixture(scope="session")
def executables(tmp_path_factory) -> Path:
    """A folder of executables that tests may share, those of other workers too: a program that
    several of them run is compiled once. Name it in `POPXL_CACHE_DIR`."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "executables"
    folder.mkdir(exist_ok=True)
    return folder
