"""Where and when values are kept changes no bit: activations kept or computed again, layers that
stay on the device or come from the host, loads far ahead of their use or just in time, entries that
the plan places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import modelling.gptj.model
import modelling.llama.model
import modelling.t5.model
import popxl
import tests.modelling.gptj.training as gptj
import tests.modelling.llama.training as llama
import tests.modelling.t5.training as t5
from config.sections import RunConfig
from modelling.model_family import ModelFamily
from modelling.phases.settings import ALL
from modelling.phases.training import TrainingProgram, build_training_program
from planning.program_variants import Build, ProgramVariant
from popxl._compile import platforms
from popxl._run import program
from popxl._schedule import lookahead
from sessions import training as sessions
from tests.modelling.gptj.hf import small_config
from tests.modelling.llama.hf import hf_config
from tests.modelling.llama.hf import our_config as llama_config
from tests.modelling.sessions import fine_tuning
from tests.slow import slow

STEPS = 3
PART = 0.6  # of the buffers has room in device memory, for some entries and not for all

T5 = modelling.t5.model.FAMILY, t5
GPTJ = modelling.gptj.model.FAMILY, gptj
LLAMA = modelling.llama.model.FAMILY, llama


def _config(
    family: Any, execution: dict[str, Any], precision: str, dropout: float, **split: Any
) -> Any:
    """A small model, whose steps have several micro-batches.

    Args:
        execution: fields of that section.
        split: arguments of the family's `our_config` or `small_config`, `slices` of attention,
            which weights are `trained`, and if products are in `fp8`.
    """
    slices, trained = split.pop("slices", 1), split.pop("trained", None)
    fp8 = split.pop("fp8", False)
    config: RunConfig
    if family is LLAMA:  # with windows, norms on both sides, caps
        config = llama_config(hf_config("gemma2"), **split)
    else:
        config = small_config(**split) if family is GPTJ else t5.our_config(**split)
    found = config.to_dict()
    found["model"] |= {"precision": precision, "dropout_prob": dropout}
    found["training"]["trainable"] = trained
    found["fp8"]["enabled"] = fp8
    scaling = 128.0 if precision == "float16" else 1.0
    found["execution"] |= {
        "attention_serialisation": slices,
        "loss_scaling": scaling,
        **execution,
    }
    return type(config).from_dict(found)


def _train(family: Any, config: Any) -> tuple[list[float], list[float], dict[str, bytes]]:
    """Losses and gradient norms of some steps, and the bits of weights and optimizer state then.

    Two more steps, of one batch at a rate of 0, show by their losses whether there is dropout.
    """
    record, module = family
    *batches, last = module.batches(STEPS)
    model = fine_tuning(config)
    model.write(record.weight_map(config).init_weights(seed=0))
    with model:
        results = []
        steps = [(b, module.RATE) for b in batches] + 2 * [(last, 0)]
        at_once = config.execution.device_iterations
        for first in range(0, len(steps), at_once):
            several, rates = zip(*steps[first : first + at_once], strict=True)
            results += model.run(several, rates, first)
        state = {name: np.asarray(value).tobytes() for name, value in model.read().items()}
    return [r.loss for r in results], [r.grad_norm for r in results], state


BOTH_WAYS = [(0.6, False), (1.0, True)]


@contextmanager
def _two_memories(
    window: int | None = None,
    device: float | None = None,
    kinds: int = 0,
    share: float = 1.0,
    per_pass: int | None = None,
    matmul_inputs: bool = False,
) -> Iterator[None]:
    """Entries move as on a GPU.

    Args:
        kinds: of layers that keep their activations, the last ones, if the configuration leaves it
            open.
        share: of the layers of each.
        window: bytes that loads may be ahead; default: the plan's.
        device: the fraction of the buffers for which there is room on the device.
        per_pass: micro-batches per pass; default: all.
        matmul_inputs: True if layers that keep their activations also keep what products read.
    """

    def placed(config: RunConfig, build: Build) -> TrainingProgram:
        variant = ProgramVariant(per_pass or config.gradient_accumulation)
        program = build(variant)
        if kinds:
            names = list(program.phases_by_type.values())[-kinds:]
            kept = frozenset((name, share) for each in names for name in each)
            program = build(replace(variant, saved_layers=kept, saves_matmul_inputs=matmul_inputs))
            if share < 1:
                assert any(
                    phase.endswith("_saved")
                    for each in program.phases_by_type.values()
                    for phase in each
                )
        if device is not None:
            traced = popxl.plan.trace_program(program.ir)
            machine = popxl.plan.Rates(
                flops=1e12, float8_flops=1e12, bandwidth=1e11, host_link=1e9, link=1e9, network=1e9
            )
            plan = traced.plan()
            placement = popxl.plan.place_entries(
                traced, machine, plan.device_bytes + int(device * plan.remote)
            )
            some = any(0 < kind.entries < kind.total for kind in placement.kinds)
            assert some or per_pass, "entries of one pass are few: kinds stay whole, or not"
        return program

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(platforms.Cpu, "host_memory", "pinned_host"))
        if window is not None:
            patches.enter_context(
                mock.patch.object(lookahead, "default_prefetch_window", return_value=window)
            )
        patches.enter_context(mock.patch.object(sessions, "build_placed_program", placed))
        yield


def _check(family: Any, precision: str, dropout: float, quick: bool = False, **split: Any) -> None:
    """Assert that all ways give the same; only that both `activations` do, if `quick`."""

    def train(ahead: int = 2**30, **execution: Any) -> Any:
        """`ahead`: bytes of entries that may be on their way at a time."""
        config = _config(family, execution, precision, dropout, **split)
        with mock.patch.object(program, "_IN_FLIGHT", ahead):
            return _train(family, config)

    expected = train(activations="recompute")
    others = [train(activations="keep")]
    if not quick:
        others.append(train(activations="recompute", resident_layers=1, ahead=1))
        for ways in ({"window": 0}, {}, {"device": PART}):
            with _two_memories(**ways):
                others.append(train(activations="recompute"))
        for share in (1.0, 0.6):
            with _two_memories(kinds=1, share=share):
                others.append(train(activations="auto"))
        for device, kinds in ((None, 0), (PART, 0), (PART, 1)):
            with _two_memories(device=device, kinds=kinds, per_pass=1):
                others.append(train(activations="auto"))
    for found in others:
        assert found[:2] == expected[:2]
        assert [n for n in expected[2] if found[2][n] != expected[2][n]] == []
    losses = expected[0]
    assert (losses[-2] == losses[-1]) == (dropout == 0)


@pytest.mark.slow
@pytest.mark.usefixtures("cached")
def test_t5_in_float32() -> None:
    """The slow ones are compiled as for users, which decides the bits, too."""
    _check(T5, "float32", 0.2, quick=True, tp=2, layers=1)


@pytest.mark.slow  # by default some layers keep them, and frozen ones are trained as in torch
@pytest.mark.usefixtures("cached")
def test_some_trained() -> None:
    """With a layer that has no backward pass."""
    _check(GPTJ, "float32", 0.2, quick=True, layers=2, trained="layer.1.ln_1")


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(
    ("family", "split", "kept"),
    [
        slow(GPTJ, {"tp": 2, "layers": 3}, BOTH_WAYS),
        slow(T5, {"tp": 2, "layers": 3}, BOTH_WAYS),
        slow(GPTJ, {"layers": 2, "fp8": True}, BOTH_WAYS),
        slow(LLAMA, {"fp8": True}, BOTH_WAYS),
        slow(LLAMA, {}, BOTH_WAYS),
        (LLAMA, {}, [(0.6, True)]),
    ],
)
def test_some_layers_keep_their_activations(
    family: Any, split: dict[str, Any], kept: list[tuple[float, bool]]
) -> None:
    """The last ones, with buffers for them alone; of two kinds that alternate, some of each.

    Args:
        kept: shares of the layers, and whether they keep what products read.
    """
    precision = "bfloat16" if "fp8" in split else "float32"
    config = _config(family, {"activations": "auto"}, precision, 0.2, **split)
    with _two_memories():
        expected = _train(family, config)
    for share, matmul_inputs in kept:
        with _two_memories(kinds=2, share=share, matmul_inputs=matmul_inputs):
            assert _train(family, config) == expected


@pytest.mark.slow  # half a minute on 2 cores
def test_gptj_in_bfloat16_with_sliced_attention() -> None:
    _check(GPTJ, "bfloat16", 0.2, dp=2, tp=2, slices=2)


@pytest.mark.slow  # 5 minutes on 2 cores
@pytest.mark.parametrize(
    ("family", "precision", "dropout", "split"),
    [
        (T5, "float32", 0.0, {}),
        (T5, "bfloat16", 0.2, {"dp": 2, "micro_batch": 2}),
        (T5, "float16", 0.2, {"slices": 2}),
        (T5, "float32", 0.2, {"dp": 2, "tp": 2}),
        (GPTJ, "float32", 0.2, {"tp": 2, "slices": 2, "micro_batch": 2}),
        (GPTJ, "bfloat16", 0.0, {}),
        (GPTJ, "float16", 0.2, {"slices": 3}),
        (LLAMA, "float32", 0.2, {"tp": 4, "micro_batch": 2}),
        (LLAMA, "bfloat16", 0.2, {"dp": 2, "tp": 2, "micro_batch": 2, "slices": 3}),
        (T5, "bfloat16", 0.2, {"dp": 2, "micro_batch": 2, "trained": "encoder.2,decoder.1"}),
        (GPTJ, "bfloat16", 0.2, {"tp": 2, "micro_batch": 2, "trained": "layer.1,layer.2"}),
        (LLAMA, "float32", 0.2, {"dp": 2, "tp": 2, "micro_batch": 2, "trained": "*norm*"}),
    ],
)
def test_all_types(family: Any, precision: str, dropout: float, split: dict[str, Any]) -> None:
    _check(family, precision, dropout, **split)


def _saved(config: RunConfig, family: ModelFamily, matmul_inputs: bool) -> Counter[Any]:
    """Features and dtypes of the activations that layers save, by number."""
    ir = build_training_program(
        config,
        family.build_phases,
        saved_fractions={ALL: 1.0},
        saves_matmul_inputs=matmul_inputs,
    ).ir
    buffers = [b for b in ir.remote_buffers if b.kind == "activations inside layers"]
    return Counter((*b.tensor_shape[-1:], b.tensor_dtype) for b in buffers)


@pytest.mark.parametrize(
    ("family", "inner", "mlps"),
    [
        (GPTJ, "ffn_hidden_size", 1),
        (LLAMA, "intermediate_size", 2),  # of two layer types
        (T5, "d_ff", 2 * 2),  # of first layers and others
    ],
)
def test_inputs_of_products_are_kept_beside_their_results(
    family: Any, inner: str, mlps: int
) -> None:
    """Outputs of activation functions, gated or not."""
    config = _config(family, {"activations": "auto"}, "float32", 0.0)
    kept = [_saved(config, family[0], inputs) for inputs in (False, True)]
    assert kept[1] - kept[0] == {(getattr(config.model, inner), popxl.float32): mlps}
    assert kept[0] <= kept[1]


def test_in_fp8_the_values_that_products_read_are_kept() -> None:
    """Not what they were rounded from."""
    config = _config(GPTJ, {"activations": "auto"}, "bfloat16", 0.0, fp8=True)
    without, saved = (_saved(config, GPTJ[0], inputs) for inputs in (False, True))
    size, e4m3 = config.model.hidden_size, popxl.float8_e4m3fn
    products = 3  # that of queries, keys and values reads the norm's output, too
    assert saved - without == {
        (size, e4m3): 2 + 1,
        (config.model.ffn_hidden_size, e4m3): 1,
        (popxl.float32,): 2 * (products + 1),  # scales and amaxes
    }


@pytest.mark.parametrize(("share", "layers"), [(0.5, 2), (0.25, 1), (1.0, 4)])
def test_layers_that_compute_again_have_no_room_for_activations(share: float, layers: int) -> None:
    family = modelling.gptj.model.FAMILY
    config = _config(GPTJ, {"activations": "auto"}, "float32", 0.0)
    config = config.with_values({"model.layers": 4})
    ir = build_training_program(config, family.build_phases, saved_fractions={"layer": share}).ir
    kept = [b for b in ir.remote_buffers if b.kind == "activations inside layers"]
    micro_batches = config.training.global_batch_size // config.execution.micro_batch_size
    assert {buffer.entries for buffer in kept} == {layers * micro_batches}
