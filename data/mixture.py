"""Mixtures of data sets: training sources with weights and settings of their own.

The file that `data.train` names has a section for each source:

    chats:
      train: chats.jsonl
      weight: 3
    manual:
      train: manual/
      weight: 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from glob import glob
from math import inf
from operator import add, truediv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config.sections import Data
from config.task import MIXTURE_SUFFIXES
from data.file_readers import DataError
from data.samples import Samples, hash_arrays, sample_lengths, shuffle_epoch
from data.sources import PARALLEL
from data.truncation import TruncationCounts
from files.formatting import format_name, format_path, format_value
from files.yaml_files import LocatedDict, location_prefix, read_yaml

WEIGHT = "weight"
SOURCE_FIELDS = (
    "train", WEIGHT, "format", "prompt", "target", "messages", "system", "class_labels", "on_null",
    "on_long_target", "loss_on", "separator", "packing", "source_language", "target_language",
)  # fmt: skip
"""Fields of a source; all but the first two default to the run's settings."""

RUN_FIELDS = ("validation", "format", "separator")
"""Settings that a source does not inherit from the run, which derives them for all sources."""


class MixtureSource(NamedTuple):
    """One data set of a mixture of data sets, with its weight and settings.

    Attributes:
        weight: share of the samples, relative to all weights; None: no source has one.
        data: its settings.
    """

    name: str
    weight: float | None
    data: Data


def read_mixture(data: Data) -> list[MixtureSource]:
    """Read the sources of the mixture file that `data.train` names.

    Raises:
        UserError: the file cannot be read, or says something else.
    """
    path = Path(data.train or "")
    sources = [
        _parse_mixture_source(data, path, name, values) for name, values in read_yaml(path).items()
    ]
    without_weight = [source.name for source in sources if source.weight is None]
    if not sources or 0 < len(without_weight) < len(sources):
        problem = (
            f"{format_name(without_weight[0])} has no weight"
            if without_weight
            else "it has no source"
        )
        raise DataError(
            f"{format_path(path)}: {problem}: give each source a weight, or none to read each once"
        )
    return sources


def _parse_mixture_source(data: Data, path: Path, name: str, values: Any) -> MixtureSource:
    location = f"{format_path(path)}: {format_name(name)}"
    if not isinstance(values, LocatedDict) or not isinstance(values.get("train"), str):
        raise DataError(f"{location} must be a section that says train: FILE")
    unknown = next((field for field in values if field not in SOURCE_FIELDS), None)
    if unknown is not None:
        raise DataError(
            f"{location_prefix(values, unknown)}a source of a mixture has no field "
            f"{format_name(unknown)}: it has {', '.join(SOURCE_FIELDS)}"
        )
    weight: Any = values.get(WEIGHT)
    if WEIGHT in values and (type(weight) not in (int, float) or not 0 < float(weight) < inf):
        raise DataError(
            f"{location_prefix(values, WEIGHT)}the weight is {format_value(weight)}, but must be a "
            "positive number"
        )
    train = _resolve_file_names(path.parent, values["train"])
    if Path(train).suffix.lower() in MIXTURE_SUFFIXES:
        raise DataError(f"{location} is a mixture, but a mixture has files, folders and data sets")
    overrides = {field: value for field, value in values.items() if field != WEIGHT}
    settings = data.to_dict()
    settings |= (
        {field: None for field in RUN_FIELDS if field in settings} | overrides | {"train": train}
    )
    return MixtureSource(
        name, weight, type(data).from_dict(LocatedDict(settings, values.locations), name)
    )


def _resolve_file_names(folder: Path, names: str) -> str:
    """Resolve file names relative to a folder; names that are no files are unchanged."""

    def resolve_name(name: str) -> str:
        path = str(folder / name)
        if Path(path).exists() or glob(path, recursive=True):
            return path
        first, separator, second = name.partition(PARALLEL)
        return f"{resolve_name(first)}{PARALLEL}{resolve_name(second)}" if separator else name

    return ",".join(resolve_name(name.strip()) for name in names.split(","))


@dataclass(frozen=True)
class MixtureSamples:
    """Samples of several data sources, mixed in each epoch by the sources' weights.

    An epoch has each source's share of samples, and all its samples at least once:
    `interleave_datasets` with `all_exhausted`, but with exact shares.

    Attributes:
        sources: the samples of each source.
        samples_per_epoch: samples of each source in an epoch, at least all of them.
    """

    sources: Sequence[Samples]
    samples_per_epoch: Sequence[int]

    @classmethod
    def mix_by_weights(
        cls, sources: Sequence[Samples], weights: Sequence[float | None]
    ) -> MixtureSamples:
        """Mix data sources by weights; without weights, an epoch has each sample once."""
        sizes = [len(part) for part in sources]
        shares = [weight or size for size, weight in zip(sizes, weights, strict=True)]
        epochs = max(map(truediv, sizes, shares))
        return cls(
            sources, [max(round(epochs * share), n) for n, share in zip(sizes, shares, strict=True)]
        )

    @property
    def truncation_counts(self) -> TruncationCounts:
        """Sum of the truncation counts of all sources."""
        return reduce(add, (part.truncation_counts for part in self.sources))

    @property
    def digest(self) -> str:
        digests = b"".join(bytes.fromhex(part.digest) for part in self.sources)
        return hash_arrays(np.frombuffer(digests, np.uint8), np.asarray(self.samples_per_epoch))

    def __len__(self) -> int:
        return sum(self.samples_per_epoch)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of the sample at each position of an epoch, int64 [n]."""
        by_source = [sample_lengths(source) for source in self.sources]
        source, index = self._source_and_sample_indices.T
        starts = np.cumsum([0, *map(len, by_source)])[source]
        return np.concatenate(by_source)[starts + index]

    @cached_property
    def _source_and_sample_indices(self) -> np.ndarray:
        """Source number and sample index of each position in an epoch, int64 [n, 2].

        Each source repeats; its last repetition is cut off.
        """
        columns = []
        for source, (samples, count) in enumerate(
            zip(self.sources, self.samples_per_epoch, strict=True)
        ):
            indices = np.arange(count) % len(samples)
            columns.append(np.stack([np.full(count, source), indices], axis=1))
        return np.concatenate(columns)

    def epoch_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Indices of the samples of an epoch, int64 [n], before shuffling.

        All of a source come equally often; one more time comes a part of them, in each epoch the
        part that follows in an order of the source's own.
        """
        indices, end = np.arange(len(self)), 0
        for source, (samples, count) in enumerate(
            zip(self.sources, self.samples_per_epoch, strict=True)
        ):
            start, end = end, end + count
            remainder = count % len(samples)
            extra_indices = (epoch * remainder + np.arange(remainder)) % len(samples)
            indices[end - remainder : end] = (
                start + shuffle_epoch(seed, source, len(samples))[extra_indices]
            )
        return indices

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: arrays by name."""
        pairs = self._source_and_sample_indices[np.asarray(indices, np.int64)]
        arrays: dict[str, np.ndarray] = {}
        for source, samples in enumerate(self.sources):
            (rows_of_source,) = np.nonzero(pairs[:, 0] == source)
            if not len(rows_of_source):
                continue
            for name, array in samples.take(pairs[rows_of_source, 1]).items():
                rows = array.reshape(
                    len(rows_of_source), -1, *array.shape[1:]
                )  # a sample may have several
                if name not in arrays:
                    arrays[name] = np.empty((len(pairs), *rows.shape[1:]), array.dtype)
                arrays[name][rows_of_source] = rows
        return {name: rows.reshape(-1, *rows.shape[2:]) for name, rows in arrays.items()}
