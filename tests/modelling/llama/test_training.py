"""The phased training program against Hugging Face's models in torch, float32, of every kind."""

from __future__ import annotations

import pytest

from tests.modelling.llama.hf import (
    SETTINGS,
    hf_config,
    our_config,
)
from tests.modelling.llama.training import (
    STEPS,
    Batches,
    batches,
    check_trained,
    several_texts,
    trained,
)
from tests.modelling.sessions import transposed

LAYOUTS = {
    # (data parallel, tensor parallel, slices of attention); 2 heads of keys are shared at tp 4
    "llama": (1, 4, 3),
    "mistral": (1, 1, 1),
    "qwen2": (2, 2, 1),
    "qwen3": (1, 2, 1),
    "phi3": (1, 1, 2),
    "gemma2": (1, 1, 1),
    "gemma3_text": (1, 2, 3),
    "smollm3": (1, 1, 1),
    "olmo2": (2, 4, 1),
    "granite": (1, 1, 1),
    "ministral3": (1, 2, 2),
    "olmo3": (1, 4, 1),
    "mixtral": (1, 1, 1),
    "qwen2_moe": (2, 2, 1),
    "qwen3_moe": (1, 2, 1),
    "olmoe": (1, 1, 2),
    "gpt_oss": (2, 2, 2),
}
TRANSPOSED = ("qwen2", "smollm3", "olmo2", "ministral3")


# ---- every architecture -------------------------------------------------------------------------
def given_of(kind: str) -> Batches:
    """Texts that share samples, and long ones: only the latter where angles depend on lengths."""
    return batches(STEPS) if kind in ("qwen3", "phi3") else [several_texts(5), *batches(STEPS - 1)]


# By default models that `test_random` draws are trained so, and what these have besides is in tests
# of experts, adapters, generation and of weights that are trained alone.
@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_loss_every_gradient_and_three_steps_of_adamw(kind: str) -> None:
    dp, tp, slices = LAYOUTS[kind]
    config = our_config(hf_config(kind), dp, tp, micro_batch=2, slices=slices)
    config = transposed(config, kind in TRANSPOSED)
    given = given_of(kind)
    check_trained(config, *trained(hf_config(kind), given), given)
