"""The collectives of a step do not grow with its number of micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import popxl
from config.sections import FP8, RunConfig
from modelling.model_family import get_family
from modelling.phases.training import build_training_program
from tests.modelling.gptj.hf import small_config
from tests.modelling.t5.training import our_config
from tests.slow import slow


def collectives(config: RunConfig) -> Counter[tuple[str, int, int]]:
    """Number by kind, group size and bytes of each one."""
    plan = popxl.plan.plan_of(build_training_program(config, get_family(config).build_phases).ir)
    found: Counter[tuple[str, int, int]] = Counter()
    for part in plan.parts:
        for c in part.collectives:
            found[c.kind, c.group_size, c.nbytes // c.count] += c.count
    return found


@pytest.mark.parametrize(
    ("family", "fp8"),
    [
        ("gptj", True),
        *(slow(*case) for case in (("gptj", False), ("t5", True), ("t5", False))),
    ],
)
def test_collectives_of_a_step_do_not_grow_with_accumulation(family, fp8):
    make = our_config if family == "t5" else small_config
    """A single micro-batch is no loop, so its embeddings' gradient gathers no table: it reads none.
    """
    two, eight = (replace(make(2, 1, micro, layers=2), fp8=FP8(enabled=fp8)) for micro in (4, 1))
    assert (two.gradient_accumulation, eight.gradient_accumulation) == (2, 8)
    found = collectives(two)
    assert found
    assert collectives(eight) == found
