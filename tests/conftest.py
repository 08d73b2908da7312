"""What holds for every test: CPU, no network, no state from outside, fixed seeds."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

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
