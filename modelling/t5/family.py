"""FLAN-T5 as the scripts know it."""

from __future__ import annotations

import numpy as np

from modelling.layers.lm_head import IGNORED
from modelling.spec import Batch, ModelFamily
from modelling.t5.generation import T5Generator
from modelling.t5.training import T5Layout
from modelling.t5.weights import weight_table


def training_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """Streams of the training program, from a global batch with Hugging Face's names."""
    return {
        "words": batch["input_ids"],
        "mask": batch["attention_mask"],
        "decoder_words": batch["decoder_input_ids"],
        "labels": batch["labels"],
    }


def target_tokens(batch: Batch) -> int:
    """Tokens that the loss is the mean of: all targets of the global batch, `</s>` included."""
    return int(np.count_nonzero(batch["labels"] != IGNORED))


FAMILY = ModelFamily(
    layout=T5Layout,
    generator=T5Generator,
    weights=weight_table,
    training_inputs=training_inputs,
    target_tokens=target_tokens,
)
