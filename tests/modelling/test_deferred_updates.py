"""Updates behind the next forward pass change no bit (`execution.update`).

Each case trains with updates at the end of a step and with updates behind, reads the state in the
middle, skips a step, goes on from what was read, and compares everything to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import modelling.phases.training as program
import tests.modelling.gptj.training as gptj
import tests.modelling.llama.training as llama
import tests.modelling.t5.training as t5
from config.errors import ConfigError
from config.sections import RunConfig
from modelling.model_family import get_family
from sessions.training import TrainingSession
from tests.modelling.gptj.hf import small_config
from tests.modelling.llama.hf import hf_config
from tests.modelling.llama.hf import our_config as llama_config
from tests.modelling.sessions import fine_tuning

pytestmark = pytest.mark.usefixtures("cached")  # the two modes share most of it

STEPS, SKIPPED, RATES = 5, 3, (1e-2, 7e-3, 5e-3, 9e-3, 3e-3)

Found = tuple[list[tuple[float, float]], dict[str, bytes], dict[str, bytes]]


def t5_config(**split: int) -> RunConfig:
    return t5.our_config(**split)


def _with(config: RunConfig, update: str, changes: dict[str, dict[str, Any]]) -> RunConfig:
    found = config.to_dict()
    found["execution"]["update"] = update
    for section, fields in changes.items():
        found[section] |= fields
    return type(config).from_dict(found)


def _bits(model: TrainingSession) -> dict[str, bytes]:
    return {name: np.asarray(value).tobytes() for name, value in model.read().items()}


def _spoil_step(model: TrainingSession, spoilt: int) -> None:
    """Makes the loss of one step infinite."""
    arrays_of, calls = model._arrange_batch, []

    def spoiling(*args: Any) -> dict[str, np.ndarray]:
        found = arrays_of(*args)
        calls.append(found)
        if len(calls) == spoilt + 1:
            found["weight"][0, 0] = np.inf
        return found

    model._arrange_batch = spoiling  # type: ignore[method-assign]


def train(config: RunConfig, batches: list[Any], restart: bool = False) -> Found:
    """Losses and norms of all steps, the state after two steps, and after all.

    Args:
        restart: enter the model anew after two steps, with what was read.
    """
    model = fine_tuning(config)
    model.write(get_family(config).weight_map(config).init_weights(seed=0))
    results = []
    with model:
        for step in range(2):
            results += model.run([batches[step]], [RATES[step]], step)
        middle, state = _bits(model), model.read()
        if not restart:
            results += _rest(model, batches)
            return _numbers(results), middle, _bits(model)
    model.write(state)
    with model:
        results += _rest(model, batches)
        return _numbers(results), middle, _bits(model)


def _rest(model: TrainingSession, batches: list[Any]) -> list[Any]:
    _spoil_step(model, SKIPPED - 2)
    found = []
    for step in range(2, STEPS):
        found += model.run([batches[step]], [RATES[step]], step)
    assert [r.skipped for r in found] == [step == SKIPPED for step in range(2, STEPS)]
    return found


def _numbers(results: list[Any]) -> list[tuple[float, float]]:
    return [(r.loss, r.grad_norm) for r in results if not r.skipped]


def differences(
    config: RunConfig, batches: list[Any], changes: dict[str, dict[str, Any]], restart: bool = False
) -> list[str]:
    """Returns the differences between the two modes."""
    end, behind = (
        train(_with(config, update, changes), batches, restart and update == "deferred")
        for update in ("end", "deferred")
    )
    found = [] if end[0] == behind[0] else ["losses and norms"]
    for when, ours, theirs in zip(("middle", "last"), behind[1:], end[1:], strict=True):
        assert ours.keys() == theirs.keys()
        found += [f"{when} {name}" for name in theirs if ours[name] != theirs[name]]
    return found


HALF = {"model": {"precision": "bfloat16", "dropout_prob": 0.2}}


@pytest.mark.slow  # the next one has the same, but for RTS and two devices
def test_gptj_with_everything_random() -> None:
    """bfloat16 rounded at random, dropout, RTS, clipping, a step that is left out, a restart."""
    config = small_config(tp=2, layers=2)
    assert differences(config, gptj.batches(STEPS), HALF, restart=True) == []


def test_a_tied_embedding_is_updated_once() -> None:
    """In bfloat16 rounded at random, with dropout, a step that is left out, and a restart."""
    config = llama_config(hf_config("mistral", tie_word_embeddings=True))
    assert differences(config, llama.batches(STEPS), HALF, restart=True) == []


ADAFACTOR = {"training": {"optimizer": {"name": "adafactor"}}}
FLOAT16 = {"model": {"precision": "float16"}, "execution": {"loss_scaling": 128.0}}


@pytest.mark.slow  # 5 minutes on 2 cores
@pytest.mark.parametrize(
    ("family", "split", "changes"),
    [
        ("t5", {"dp": 2, "tp": 2, "layers": 2}, HALF),
        ("t5", {}, {}),
        ("t5", {"layers": 1}, FLOAT16),
        ("t5", {"tp": 2}, {"execution": {"activations": "keep"}}),
        ("gptj", {"dp": 2, "tp": 2}, HALF),
        ("gptj", {}, {"execution": {"resident_layers": 1}}),
        ("gptj", {"tp": 2}, {"fp8": {"enabled": True, "amax_history_len": 2}}),
        ("gptj", {"micro_batch": 16}, {}),
        ("t5", {"tp": 2}, ADAFACTOR),
        ("gptj", {"dp": 2}, ADAFACTOR | HALF),
        ("gptj", {"dp": 2, "tp": 2}, HALF | {"training": {"trainable": "layer.1,head.norm"}}),
        ("t5", {"tp": 2}, HALF | {"training": {"frozen": "shared,encoder.1"}}),
    ],
)
def test_all_ways(family: str, split: dict[str, int], changes: dict[str, Any]) -> None:
    made, batches = {"t5": (t5_config, t5.batches), "gptj": (small_config, gptj.batches)}[family]
    assert differences(made(**split), batches(STEPS), changes) == []


PAIRS = {"execution": {"device_iterations": 2}}


def test_several_steps_a_run() -> None:
    """Updates between the steps of a run, and between runs."""

    def trained(update: str) -> tuple[list[float], dict[str, bytes]]:
        config = _with(small_config(), update, PAIRS)
        model = fine_tuning(config)
        model.write(get_family(config).weight_map(config).init_weights(seed=0))
        with model:
            given = gptj.batches(4)
            found = [
                r.loss for i in (0, 2) for r in model.run(given[i : i + 2], RATES[i : i + 2], i)
            ]
            return found, _bits(model)

    assert trained("end") == trained("deferred")


def test_a_mode_that_updates_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail if an update runs twice: after a read, no update is pending."""
    config = _with(small_config(), "deferred", PAIRS)  # the program of the test above
    model = fine_tuning(config)
    model.write(get_family(config).weight_map(config).init_weights(seed=0))
    given, rates = gptj.batches(2), [1e-2, 1e-2]
    with model:
        model.run(given, rates, 0)
        once = _bits(model)
        assert _bits(model) == once
        model._pending = 0
        model.finish_update()  # the program knows by itself that there is nothing to do
        assert _bits(model) == once
        model.run(given, rates, 2)
        model._pending = None  # as if nothing were pending
        lacking = _bits(model)
        assert _bits(model) == lacking
        model._pending = 3
        model.value_readers(model.variables)  # as an evaluation does
        model._pending = None
        assert _bits(model) != lacking


def test_random_rounding_needs_runs_of_one_step() -> None:
    changes = {"execution": {"device_iterations": 2}, "model": {"precision": "bfloat16"}}
    with pytest.raises(ConfigError, match="device_iterations 1"):
        _with(small_config(), "deferred", changes)
    assert not program.defers_update(_with(small_config(), "auto", changes))


@pytest.mark.parametrize(("execution", "behind"), [({}, False), ({"disk": "scratch"}, True)])
def test_auto_hides_the_disk_of_devices_that_share_the_hosts_memory(execution, behind):
    changes = {"execution": {"device": "cpu"} | execution}
    assert program.defers_update(_with(small_config(), "auto", changes)) is behind
