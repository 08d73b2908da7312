"""Which weights leave a run that keeps the best ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from checkpoints import CheckpointStore
from config.t5 import T5Config
from run.loop import _Run

BEST, LAST = ({"w": np.full(2, value, np.float32)} for value in (1, 2))


@pytest.mark.parametrize(
    ("keep_best", "there", "expected"),
    [("loss", True, BEST), (None, True, LAST), ("loss", False, LAST)],
)
def test_the_best_weights_are_exported_where_they_are_kept(keep_best, there, expected, tmp_path):
    data = {"save": str(tmp_path), "keep_best": keep_best}
    config = T5Config.from_dict({"checkpoint": data, "evaluation": {"steps": 1}})
    if there:
        with CheckpointStore(tmp_path / "best", to_keep=1) as store:
            store.save(2, BEST, {}, wait=True)
    run = SimpleNamespace(config=config, model=SimpleNamespace(tensors=lambda optimizer: LAST))
    step, found = _Run._to_export(run, 7)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found["w"], expected["w"])
    assert step == (2 if expected is BEST else 7)
