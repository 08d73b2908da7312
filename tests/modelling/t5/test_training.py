"""The phased training program of FLAN-T5 against Hugging Face's T5 in torch, float32.

The same random weights, and a global batch whose sequences and targets have different lengths.
"""

from __future__ import annotations

import pytest

import popxl
from config.t5 import T5Config
from modelling.phases.training import build_training_program
from modelling.t5.model import FAMILY
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.t5.training import (
    PLACES,
    RATE,
    ROWS,
    STEPS,
    batches,
    join_samples,
    our_config,
    reference,
    their_model,
)
from tests.modelling.torch_training import (
    check_training,
    logical,
)
from tests.slow import slow

TRANSPOSED = (1, 2, 4)
SPLITS = [(1, 1, 2), (2, 2, 2), TRANSPOSED, (1, 1, 16), (2, 1, 4), (2, 4, 8)]


@pytest.mark.slow  # examples that share rows are trained by default, and T5 of 2019 without rows
@pytest.mark.parametrize(("dp", "tp", "micro_batch"), SPLITS)
def test_loss_every_gradient_and_five_steps_of_adamw(dp: int, tp: int, micro_batch: int) -> None:
    """Any split of the global batch over replicas and micro-batches trains as torch does; so it
    does with the sequence before the batch."""
    split = dp, tp, micro_batch
    config = transposed(our_config(*split), split == TRANSPOSED)
    model = fine_tuning(config, gradients=True)
    model.write(logical(their_model()))
    check_training(model, batches(STEPS), reference(), RATE)


# ---- several examples in a row -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dp", "tp", "micro_batch", "slices"), [(1, 1, 6, 2), slow(2, 2, 3, 2), slow(1, 2, 6, 1)]
)
def test_examples_that_share_rows_train_as_each_by_itself(
    dp: int, tp: int, micro_batch: int, slices: int
) -> None:
    """Torch's examples have a row each: nothing leaks from one example to another."""
    config = our_config(dp, tp).to_dict()
    config["training"]["global_batch_size"] = ROWS
    config["execution"] |= {"micro_batch_size": micro_batch, "attention_serialisation": slices}
    config["data"]["examples_per_sample"] = PLACES
    model = fine_tuning(transposed(T5Config.from_dict(config), slices > 1), gradients=True)
    model.write(logical(their_model()))
    check_training(model, [join_samples(batch) for batch in batches(STEPS)], reference(), RATE)


# ---- the program ---------------------------------------------------------------------------------
def test_the_program_is_verified() -> None:
    from popxl._analysis.verify import verify_ir

    verify_ir(build_training_program(our_config(2, 2), FAMILY.build_phases).ir)


def test_one_layer_has_no_block_phase() -> None:
    program = build_training_program(our_config(layers=1), FAMILY.build_phases)
    assert "encoder_block" not in program.variables
    assert isinstance(program.ir, popxl.Ir)
