"""What the records of optimizers say of state is what the graphs of their updates take."""

from __future__ import annotations

from typing import get_type_hints

import pytest

import popxl
from config.optimizer_state import MASTER, OPTIMIZERS, SLOTS, Adafactor
from config.run import Optimizer
from modelling.phases.masters import on_master
from popxl_addons.optimizers.adafactor import Whole

BETA1 = [None, 0.9]


def taken(optimizer: Optimizer, shape: tuple[int, ...], master: bool) -> dict[str, object]:
    """Shapes and types of the state that an update takes, by name."""
    step, own = optimizer.record.step(optimizer, 2, Whole)
    module = on_master(step)() if master else step()
    with popxl.Ir().main_graph:
        var = popxl.TensorSpec(shape, popxl.bfloat16 if master else popxl.float32)
        rate, grad = popxl.TensorSpec((), popxl.float32), popxl.TensorSpec(shape, popxl.float32)
        facts, _ = module.create_graph(var, grad, lr=rate, weight_decay=0.0, **own)
    return {name: (f.shape, f.dtype.name) for name, f in facts.to_dict().items()}


def test_the_registry_has_every_choice_of_the_configuration() -> None:
    assert set(get_type_hints(Optimizer)["name"].__args__) == set(OPTIMIZERS)


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("shape", [(4, 6), (5,)])
@pytest.mark.parametrize("beta1", BETA1)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_update_takes_what_the_record_keeps(name, beta1, shape, master) -> None:
    optimizer = Optimizer(name=name, adafactor=Adafactor(beta1=beta1))
    slots = [*optimizer.slots(len(shape)), SLOTS["step"], *([MASTER] if master else [])]
    assert taken(optimizer, shape, master) == {s.name: (s.shape(shape), s.dtype) for s in slots}
    assert set(slots) <= set(SLOTS.values())


def test_a_matrix_turned_swaps_what_is_kept_of_rows_and_columns() -> None:
    rows, columns = SLOTS["second_order_rows"], SLOTS["second_order_columns"]
    assert (rows.turned, columns.turned) == (columns, rows)
    assert (rows.shape((4, 6)), columns.shape((4, 6))) == ((4,), (6,))
    assert rows.nbytes((4, 6)) == 16
    assert SLOTS["first_order"].turned == SLOTS["first_order"]
