"""Lengths of buckets: encoder samples are padded to the longest of their bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from config.errors import ConfigError, ContradictionError
from config.values import split_names

if TYPE_CHECKING:
    from config.sections import RunConfig

FIELD = "data.length_buckets"


def configured_bucket_lengths(config: RunConfig) -> tuple[int, ...]:
    """Returns the padded lengths listed in `data.length_buckets`; none for decoder-only models."""
    text = getattr(config.data, "length_buckets", None)
    return tuple(sorted({int(length) for length in split_names(text)}))


def bucket_lengths(config: RunConfig) -> tuple[int, ...]:
    """Returns the padded lengths of all buckets, ascending; the last is `sequence_length`."""
    longest = config.model.sequence_length
    return (*(length for length in configured_bucket_lengths(config) if length < longest), longest)


def bucket_configs(config: RunConfig) -> list[RunConfig]:
    """Returns one configuration for each shorter length bucket, ascending."""
    return [
        config.with_values({"model.sequence_length": length, FIELD: None})
        for length in bucket_lengths(config)[:-1]
    ]


def check_length_buckets(config: RunConfig) -> None:
    """Raises ConfigError for length buckets with which the configured run cannot train."""
    lengths, execution = configured_bucket_lengths(config), config.execution
    if not lengths or config.model.eval:
        return
    if execution.device_iterations > 1:
        raise ContradictionError(
            f"{FIELD} chooses a program for each step, so that execution.device_iterations must be "
            f"1, not {execution.device_iterations}",
            {"execution.device_iterations": 1, FIELD: None},
        )
    if execution.attention_serialisation == "auto":
        return
    for length in bucket_lengths(config)[:-1]:
        if length % execution.attention_serialisation:
            raise ConfigError(
                f"{FIELD} has {length}, which must be divisible by "
                f"execution.attention_serialisation {execution.attention_serialisation}"
            )


def unused_bucket_lengths(config: RunConfig) -> tuple[int, ...]:
    """Returns the listed bucket lengths that are not padded to: `sequence_length` and above."""
    return tuple(n for n in configured_bucket_lengths(config) if n >= config.model.sequence_length)
