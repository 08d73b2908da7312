"""Warnings before a run trains: samples that learn next to nothing, are mostly padding, are longer
than the model was made for, or are fewer than a batch."""

from __future__ import annotations

import numpy as np

from config.sections import RunConfig
from config.task import Seq2SeqData
from data.samples import Samples, labelled_tokens, segments_of

LOOKED_AT = 256
"""Samples, evenly spread."""

MOST_PADDING = 0.9
LEAST_LEARNED = 1.0
"""Tokens of a text: its end alone, which answers nothing."""


def sample_notes(config: RunConfig, samples: Samples) -> list[str]:
    """What a person should know of the samples that a run will train on."""
    chosen = samples.take(np.unique(np.linspace(0, len(samples) - 1, LOOKED_AT).astype(int)))
    segments = segments_of(chosen)
    padding = float(np.mean(segments == 0))
    texts = max(int(segments.max(axis=1).sum()), 1)
    learned, batch = labelled_tokens(chosen) / texts, config.training.global_batch_size
    notes = {
        f"a text has {learned:.1f} tokens to learn on average, its end included: --data.preview 3 "
        "shows which": learned <= LEAST_LEARNED,
        f"{padding:.0%} of the tokens are padding: lower --sequence_length, or raise "
        "--examples_per_row": padding > MOST_PADDING,
        f"a batch of {batch} takes each of the {len(samples)} samples {batch / len(samples):.1f} "
        "times: lower --global_batch_size": batch > len(samples),
    }
    return [f"warning: {text}" for text, holds in notes.items() if holds]


def length_note(config: RunConfig, written: int = 0) -> list[str]:
    """Whether texts have more tokens than the model was made for.

    Args:
        written: tokens that follow those that are read.
    """
    shared = 2 if config.training.prefers and not isinstance(config.data, Seq2SeqData) else 1
    most, read = config.model.max_position_embeddings, config.model.sequence_length // shared
    if most is None or read + written <= most:
        return []
    answers = f", and up to {written} follow" if written else ""
    return [
        f"warning: model.sequence_length is {read}{answers}, but the model was made for {most} "
        "tokens: it may not make sense of positions that it has never seen"
    ]
