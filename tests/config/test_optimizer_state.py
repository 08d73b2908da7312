"""The state slots of optimizer specs are the variables of their update graphs."""

from __future__ import annotations

from typing import get_type_hints

import pytest

import popxl
from config.optimizer_state import (
    MASTER_WEIGHT,
    OPTIMIZERS,
    RESIDUAL_SLOTS,
    STATE_SLOTS,
    Adafactor,
    StateSlot,
)
from config.training import Optimizer
from modelling.phases.master_weights import with_master_weight
from popxl_addons.optimizers.adafactor import MatrixLayout

BETA1 = [None, 0.9]


def taken(
    optimizer: Optimizer, shape: tuple[int, ...], kept: StateSlot | None
) -> dict[str, object]:
    """Shapes and types of the state that an update takes, by name."""
    step, own = optimizer.registry_entry.build_step(optimizer, len(shape), MatrixLayout)
    module = step() if kept is None else with_master_weight(step, kept)()
    with popxl.Ir().main_graph:
        var = popxl.TensorSpec(shape, popxl.float32 if kept is None else popxl.bfloat16)
        rate, grad = popxl.TensorSpec((), popxl.float32), popxl.TensorSpec(shape, popxl.float32)
        facts, _ = module.create_graph(var, grad, lr=rate, weight_decay=0.0, **own)
    return {name: (f.shape, f.dtype.name) for name, f in facts.to_dict().items()}


@pytest.mark.parametrize("dtype", get_type_hints(StateSlot)["dtype"].__args__)
def test_the_size_of_an_element_is_that_of_its_type(dtype: str) -> None:
    assert StateSlot("moment", dtype=dtype).itemsize == popxl.dtype.from_name(dtype).itemsize


def test_the_registry_has_every_choice_of_the_configuration() -> None:
    assert set(get_type_hints(Optimizer)["name"].__args__) == set(OPTIMIZERS)


@pytest.mark.parametrize("kept", [None, MASTER_WEIGHT, *RESIDUAL_SLOTS.values()])
@pytest.mark.parametrize("shape", [(4, 6), (5,), (2, 70)])
@pytest.mark.parametrize("beta1", BETA1)
@pytest.mark.parametrize("state", ["float32", "bfloat16", "8bit_residual8"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_update_takes_what_the_record_keeps(name, state, beta1, shape, kept) -> None:
    optimizer = Optimizer(name=name, state=state, adafactor=Adafactor(beta1=beta1))
    slots = [
        *optimizer.state_slots(len(shape)),
        STATE_SLOTS["step"],
        *([] if kept is None else [kept]),
    ]
    assert taken(optimizer, shape, kept) == {s.name: (s.shape(shape), s.dtype) for s in slots}
    assert {slot.name for slot in slots} <= set(STATE_SLOTS)


def test_a_matrix_turned_swaps_what_is_kept_of_rows_and_columns() -> None:
    rows, columns = STATE_SLOTS["second_order_rows"], STATE_SLOTS["second_order_columns"]
    assert (rows.transposed_slot, columns.transposed_slot) == (columns, rows)
    assert (rows.shape((4, 6)), columns.shape((4, 6))) == ((4,), (6,))
    assert rows.nbytes((4, 6)) == 16
    assert STATE_SLOTS["first_order"].transposed_slot == STATE_SLOTS["first_order"]
