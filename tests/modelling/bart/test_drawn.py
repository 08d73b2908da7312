"""Random models of BART and its relatives against Hugging Face's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from modelling.generation import BeamSearchStrategy, GreedyStrategy
from tests.modelling.bart import test_folders
from tests.modelling.bart.hf import NUM_DRAWN
from tests.modelling.bart.test_generation import check_tokens
from tests.modelling.bart.test_training import check_kind, check_packed

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.mark.slow
@pytest.mark.quickly
@pytest.mark.parametrize("seed", range(NUM_DRAWN))
def test_thirty_drawn_models_are_hugging_faces(seed: int, tmp_path: Path) -> None:
    """Training, one or several examples a row; generation; folders, both ways."""
    kind, rng = f"drawn {seed}", np.random.default_rng([64, seed])
    dp, tp = LAYOUTS[rng.integers(4)]
    if rng.integers(2):
        check_packed(kind, dp, tp, 3, str(rng.choice(["keep", "recompute"])))
    else:
        check_kind(kind, dp, tp)
    strategy = (GreedyStrategy(), BeamSearchStrategy(3, 0.7))[rng.integers(2)]
    weights, places = ("resident", "streamed")[rng.integers(2)], int(rng.choice([1, 4]))
    check_tokens(kind, strategy, 1, int(rng.choice([1, 2])), weights, places)
    test_folders.test_export_is_loaded_by_transformers_bit_for_bit(kind, tmp_path / "ours")
    test_folders.test_a_folder_of_transformers_is_read_bit_for_bit(kind, tmp_path / "theirs")
