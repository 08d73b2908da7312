"""What T5 has, all encoder-decoders have: where state is and when it is updated changes no bit."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from config.errors import ConfigError
from tests.modelling.encoder_decoders import KINDS
from tests.modelling.sessions import check_continuing, fine_tuning
from tests.modelling.test_deferred_updates import differences
from tests.modelling.test_passes import all_on_disk
from tests.modelling.test_state_8bit import with_state
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
        use = model.session.memory_use()
        assert (use.disk > 0) == (config.execution.disk is not None)
        assert use.disk == 0 or use.remote < use.disk / 10
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
    [one_of_many(kind, 1 + n % 2, tuple(WAYS)) for n, kind in enumerate(KINDS)],
)
def test_where_state_is_changes_no_bit(kind: str, tp: int, ways: tuple[str, ...]) -> None:
    """With dropout, and several micro-batches. By default test_passes.py has passes of T5, and
    tests/sessions/test_shared_weights.py the state of GPT-J on disk."""
    numbers, state = train(kind, tp, {})
    for way in ways:
        found = train(kind, tp, WAYS[way])
        assert found[0] == numbers, way
        assert [name for name in state if found[1][name] != state[name]] == [], way


@pytest.mark.slow
@pytest.mark.quickly
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_compact_state_continues_bit_for_bit(kind: str) -> None:
    """In bfloat16, and with updates behind the next forward pass: these change no bit either."""
    of = KINDS[kind]
    config = with_state(of.config(1, 2, 8), "8bit_residual8", "bfloat16")
    changes = {"model": {"precision": "bfloat16", "dropout_prob": 0.2}}
    assert differences(config, of.batches(5), changes, restart=True) == []
    model = fine_tuning(config.with_values({"model.precision": "bfloat16"}))

    def run(model: Any, first: int, last: int) -> None:
        for step in range(first, last):
            model.run([of.batches(last)[step]], [of.rate], step)

    half = check_continuing(model, of.weights(), run)
    assert {a.dtype.name for a in half.values()} >= {"bfloat16", "int8", "uint8"}


def test_delayed_scaling_is_refused_where_a_layer_has_two_inputs() -> None:
    config = KINDS["t5gemma2"].config(1, 1, 8)
    with pytest.raises(ConfigError, match="set fp8.recipe current"):
        config.with_values({"fp8.enabled": True})


@pytest.mark.slow
@pytest.mark.quickly
def test_a_layer_with_two_inputs_trains_in_fp8_by_current_scaling() -> None:
    of, fp8 = KINDS["t5gemma2"], {"fp8.enabled": True, "fp8.recipe": "current"}

    def losses(dp: int, tp: int, fields: dict[str, Any]) -> list[float]:
        model = fine_tuning(of.config(dp, tp, 4).with_values(fields))
        model.write(of.weights())
        with model:
            return [model.run([batch], [of.rate])[0].loss for batch in of.batches(STEPS)]

    plain, rounded = losses(1, 1, {}), losses(1, 1, fp8)
    assert plain != rounded
    np.testing.assert_allclose(rounded, plain, rtol=1e-2)
    np.testing.assert_allclose(losses(2, 2, fp8), rounded, rtol=1e-3)
