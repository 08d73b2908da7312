"""Classifiers of transformers as references: their weights, losses and batches of random texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from trl import RewardTrainer

from config.sections import RunConfig
from data.labeled_samples import IS_LABELED, LABELS, LabeledSamples
from data.samples import Batch
from data.seq2seq import shift_right
from data.token_sequences import DecodedSequences, TokenSequences, pack_rows

NAMES = ("red", "green", "blue")


def labelling(config: Any, objective: str, multi: bool = False, batch: int = 8, **data: Any) -> Any:
    """The configuration that learns labels of texts."""
    training = replace(
        config.training,
        objective=objective,
        global_batch_size=batch,
        multi_label=multi or None,
        center_rewards_coefficient=0.1 if objective == "reward" else 0.0,
    )
    data = {"class_labels": ",".join(NAMES), **data}
    return replace(config, training=training, data=replace(config.data, **data))


def random_batches(
    config: RunConfig, vocabulary: int, count: int, decodes: bool, end: int, pad: int
) -> list[Batch]:
    """Global batches of random texts, each with random labels.

    Some texts have end or padding tokens in their midst; of an encoder-decoder all end with one.
    """
    rng = np.random.default_rng(3)
    places, size = config.data.examples_per_sample, config.training.global_batch_size
    length, width = config.model.sequence_length, config.num_labels
    longest = length // 2 if places > 1 or config.training.has_row_pairs else length
    texts = []
    for _ in range(6 * size * count * places):
        ids = rng.integers(0, vocabulary, rng.integers(2, longest + 1), np.int32)
        if decodes:
            ids[ids == pad] = 3
            if config.training.has_row_pairs:  # transformers takes no batch that differs in them
                ids[ids == end] = 3
            ids[-1] = end
        texts.append(ids)
    per_row = 2 if config.training.has_row_pairs else 1
    rows, slots = pack_rows(texts, per_row, length, places)
    pooling = "eos" if decodes else "last_non_pad"
    samples: Any = TokenSequences(texts, slots, length, end, pad, pooling)
    if decodes:
        samples = DecodedSequences(samples, partial(shift_right, pad_token_id=pad))
    labels = rng.standard_normal((len(texts) // per_row, width)).astype(np.float32)
    if config.training.multi_label:
        labels = (labels > 0).astype(np.float32)
    elif config.training.objective == "classification":
        labels = np.eye(width, dtype=np.float32)[rng.integers(0, width, len(texts))]
    labeled = LabeledSamples(samples, rows, labels)
    assert len(labeled) >= size * count
    # The last batch holds the emptiest samples.
    first = [np.arange(i * size, (i + 1) * size) for i in range(count - 1)]
    return [labeled.take(i) for i in [*first, np.arange(len(labeled) - size, len(labeled))]]


def texts_of(batch: Mapping[str, torch.Tensor], per_row: int = 1) -> list[torch.Tensor]:
    """The token ids of each text of a batch, (1, length)."""
    texts, places = [], per_row * len(batch[IS_LABELED]) // len(batch["input_ids"])
    for ids, numbers in zip(batch["input_ids"], batch["segment_ids"], strict=True):
        texts += [ids[numbers == n][None] for n in range(1, places + 1)]
    return texts


def loss_of(
    model: Any, batches: list[Batch], multi: bool
) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """The loss of a classifier of transformers over the texts of a batch, each by itself."""

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        same = (b for b in batches if np.array_equal(b["input_ids"], batch["input_ids"]))
        labels = torch.tensor(next(same)[LABELS].astype(np.float64))
        texts = texts_of(batch)
        there = [i for i, text in enumerate(texts) if text.shape[1]]
        logits = torch.cat([model(input_ids=texts[i]).logits for i in there])
        labels = labels[there]
        if multi:
            return functional.binary_cross_entropy_with_logits(logits, labels)
        if model.config.num_labels == 1:
            return functional.mse_loss(logits, labels)
        return functional.cross_entropy(logits, labels.argmax(1))

    return loss


def reward_loss_of(
    model: Any, batches: list[Batch], coefficient: float
) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """The loss of TRL's trainer over the pairs of a batch, padded."""
    accelerator = SimpleNamespace(gather=lambda t: t, gather_for_metrics=lambda t: t)

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        same = (b for b in batches if np.array_equal(b["input_ids"], batch["input_ids"]))
        given = next(same)
        texts, there = texts_of(batch, 2), np.flatnonzero(given[IS_LABELED])
        chosen, rejected = ([texts[2 * i + j][0] for i in there] for j in (0, 1))
        pad = model.config.pad_token_id
        input_ids = pad_sequence([*chosen, *rejected], True, pad)
        mask = pad_sequence([torch.ones_like(t) for t in [*chosen, *rejected]], True, 0)
        margin = torch.tensor(given[LABELS][there, 0].astype(np.float64))
        metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        trainer = SimpleNamespace(
            model=model,
            args=SimpleNamespace(center_rewards_coefficient=coefficient or None),
            accelerator=accelerator,
            _metrics=metrics,
            _total_train_tokens=0,
            _tp_size=1,
        )
        inputs = {"input_ids": input_ids, "attention_mask": mask, "margin": margin}
        found = RewardTrainer.compute_loss(trainer, model, inputs)
        told.append({name: values[-1] for name, values in metrics["eval"].items()})
        return found

    told: list[dict[str, float]] = []
    loss.told = told  # type: ignore[attr-defined]
    return loss
