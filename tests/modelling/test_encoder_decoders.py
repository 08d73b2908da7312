"""Where state is, and when it is updated, changes no bit of any encoder-decoder."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from tests.modelling.encoder_decoders import KINDS
from tests.modelling.sessions import fine_tuning
from tests.modelling.test_passes import all_on_disk
from tests.slow import one_of_many

pytestmark = pytest.mark.usefixtures("cached")

STEPS = 2
PLAIN = {
    "model.dropout_prob": 0.2,
    "execution.activations": "recompute",
    "execution.update": "end",
    "execution.micro_batches_per_pass": 2,
}
WAYS: dict[str, dict[str, Any]] = {
    "on disk": {"execution.disk": "a folder"},
    "on disk, updated behind": {"execution.disk": "a folder", "execution.update": "deferred"},
    "resident": {"execution.resident_layers": 3, "execution.activations": "keep"},
    "passes": {"execution.micro_batches_per_pass": 1},
}


def train(kind: str, tp: int, fields: dict[str, Any]) -> tuple[list[Any], dict[str, bytes]]:
    """Losses and norms of the gradients, and all of the state after the steps."""
    of = KINDS[kind]
    config = of.config(1, tp, 8).with_values(PLAIN | fields)
    with ExitStack() as stack:
        if config.execution.disk is not None:
            folder = stack.enter_context(all_on_disk())
            config = config.with_values({"execution.disk": folder})
        model = fine_tuning(config)
        assert (model.session.memory_use().disk > 0) == (config.execution.disk is not None)
        model.write(of.weights())
        with model:
            results = [
                model.run([batch], [of.rate], step)[0]
                for step, batch in enumerate(of.batches(STEPS))
            ]
            state = {name: np.asarray(value).tobytes() for name, value in model.read().items()}
    return [(result.loss, result.grad_norm) for result in results], state


@pytest.mark.parametrize(
    ("kind", "tp", "ways"),
    [
        ("t5gemma2", 1, ("on disk",)),
        *(one_of_many(kind, 1 + n % 2, tuple(WAYS)) for n, kind in enumerate(KINDS)),
    ],
)
def test_where_state_is_changes_no_bit(kind: str, tp: int, ways: tuple[str, ...]) -> None:
    """With dropout, and several micro-batches."""
    numbers, state = train(kind, tp, {})
    for way in ways:
        found = train(kind, tp, WAYS[way])
        assert found[0] == numbers, way
        assert [name for name in state if found[1][name] != state[name]] == [], way
