"""Warnings at the start of training, on samples, context length and frozen weights."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from config.length_buckets import unused_bucket_lengths
from config.sections import RunConfig
from config.task import Seq2SeqData
from data.samples import Samples, count_loss_tokens, get_segment_ids
from files.formatting import format_names
from modelling.weights import Weight, WeightMap, WeightMapping
from modelling.weights.weight_mapping import module_name

NUM_CHECKED_SAMPLES = 256
"""Number of samples, evenly spaced."""

MAX_PADDING_FRACTION = 0.9
MIN_LOSS_TOKENS = 1.0
"""Loss tokens of a sequence that has only its end token."""
MIN_SHOWN_FRACTION = 0.005
"""Fraction of the weights below which a module is not listed."""


def data_warnings(config: RunConfig, samples: Samples) -> list[str]:
    """Return warnings about training data: few samples or loss tokens, or much padding."""
    checked = samples.take(
        np.unique(np.linspace(0, len(samples) - 1, NUM_CHECKED_SAMPLES).astype(int))
    )
    segments = get_segment_ids(checked)
    padding = float(np.mean(segments == 0))
    texts = max(int(segments.max(axis=1).sum()), 1)
    batch, loss_tokens = config.training.global_batch_size, math.inf
    if "labels" in checked:
        loss_tokens = count_loss_tokens(checked) / texts
    buckets = ", or give --data.length_buckets" if isinstance(config.data, Seq2SeqData) else ""
    notes = {
        f"a text has {loss_tokens:.1f} loss tokens on average, with its end: "
        "--data.preview 3 shows which": loss_tokens <= MIN_LOSS_TOKENS,
        f"{padding:.0%} of the tokens are padding: lower --sequence_length, raise "
        f"--examples_per_sample{buckets}": padding > MAX_PADDING_FRACTION,
        f"a batch of {batch} takes each of the {len(samples)} samples {batch / len(samples):.1f} "
        "times: lower --global_batch_size": batch > len(samples),
    }
    return [f"warning: {text}" for text, holds in notes.items() if holds]


def length_warnings(config: RunConfig, new_tokens: int = 0) -> list[str]:
    """Return warnings of a sequence length beyond the model's context, or of unused buckets.

    Args:
        new_tokens: maximum number of generated tokens.
    """
    unused = [
        f"data.length_buckets {length} is not used: samples have at most "
        f"{config.model.sequence_length} tokens"
        for length in unused_bucket_lengths(config)
    ]
    max_length = config.model.max_position_embeddings
    read_length = config.model.sequence_length // config.texts_per_example
    if max_length is None or read_length + new_tokens <= max_length:
        return unused
    answers = f", and up to {new_tokens} follow" if new_tokens else ""
    return [
        *unused,
        f"warning: model.sequence_length is {read_length}{answers}, but the model was made for "
        f"{max_length} tokens: it never saw later positions in training",
    ]


def trained_weights_summary(config: RunConfig, weight_map: WeightMap) -> list[str]:
    """Return messages on which weights of the model are trained."""
    return [*_adapter_summary(weight_map), *_new_rows_warning(config, weight_map)]


def _adapter_summary(weight_map: WeightMap) -> list[str]:
    """Return a summary by module of weights that are adapted, fully trained or frozen."""
    if not weight_map.has_adapters:
        return []
    with_adapter, full, frozen = (Counter[str]() for _ in range(3))
    for row in weight_map.without_adapters.mappings:
        inside = {name for adapter in row.adapters for name in adapter.weights}
        for weight in row.weights:
            kind = with_adapter if weight.name in inside else full if row.trainable else frozen
            kind[_module_kind(row, weight)] += math.prod(weight.shape)
    num_adapter_weights = sum(
        math.prod(w.shape) for row in weight_map.mappings if row.is_adapter for w in row.weights
    )
    total = sum(map(Counter.total, (with_adapter, full, frozen)))
    kinds = {"in full": _format_shares(full, total), "not at all": _format_shares(frozen, total)}
    more = [f"{name} {shares}" for name, shares in kinds.items() if shares]
    return [
        f"training {num_adapter_weights:,} weights of adapters beside "
        f"{with_adapter.total() / total:.1%} of the model's {total:,}, {', '.join(with_adapter)}"
        + "".join(f"; {text}" for text in more)
    ]


def _format_shares(sizes: Counter[str], total: int) -> str:
    """Format modules with their fraction of all the model's weights, largest first."""
    shares = [(name, size / total) for name, size in sizes.most_common()]
    return ", ".join(f"{name} {share:.1%}" for name, share in shares if share >= MIN_SHOWN_FRACTION)


def _module_kind(mapping: WeightMapping, weight: Weight) -> str:
    """Return the last component of a weight's module name; "experts" for weights of experts."""
    return "experts" if mapping.expert_matrices else module_name(weight.name).rpartition(".")[2]


def _new_rows_warning(config: RunConfig, weight_map: WeightMap) -> list[str]:
    """Return a warning if embedding rows of new tokens are frozen."""
    new = config.model.embedding_rows_to_initialize()
    if not new:
        return []
    from modelling.weights.lora import has_trainable_tokens

    trained = {w.name for w in weight_map.trainable_weights}
    frozen = [
        name
        for name in weight_map.vocabulary_names
        if name not in trained and not has_trainable_tokens(weight_map, name, new)
    ]
    if not frozen:
        return []
    modules = ",".join(dict.fromkeys(map(module_name, frozen)))
    field = "--adapter.modules_to_save" if config.adapter.rank else "--training.trainable"
    return [
        f"warning: the new tokens' rows in {format_names(frozen)} are not trained: "
        f"{field} {modules} trains them"
    ]
