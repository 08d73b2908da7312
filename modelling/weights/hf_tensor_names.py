"""Conversion between logical weights and the tensors of Hugging Face files.

Files can have other names for a weight, transposes, and tensors that fuse several weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from typing import Literal

import numpy as np

from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays, OverlayArrays
from files.formatting import format_name
from modelling.weights.weight_mapping import Weight, WeightsError, check_tensor_shape

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class FusedWeights:
    """Logical weights that files store as one tensor, such as fused projections.

    Attributes:
        groups: names of the weights of each matrix, concatenated along their first axis; vectors
            make a vector.
        stack: axis along which the matrices of the groups are stacked; -1: their elements are
            interleaved along the last axis; None: there is one group.
        interleaved: True if the rows of a matrix are taken from its weights in turn, instead of
            weight after weight.
        transposed: True if matrices are (in features, out features).
        in_exports: True if exported files have the fused tensor, too.
    """

    groups: tuple[tuple[str, ...], ...]
    stack_axis: Literal[0, -1] | None = None
    interleaved: bool = False
    transposed: bool = False
    in_exports: bool = True

    @classmethod
    def from_weights(cls, weights: Iterable[str]) -> FusedWeights:
        """Returns the fusion of logical weights along their first axis."""
        return cls((tuple(weights),))

    @property
    def weight_names(self) -> list[str]:
        """Names of the logical weights that make up the fused tensor, in order."""
        return list(chain(*self.groups))

    def fused_shape(self, weight_shapes: Shapes) -> tuple[int, ...]:
        """Shape of the fused tensor, from the shapes of its weights."""
        first = self.groups[0]
        matrix = sum(weight_shapes[name][0] for name in first), *weight_shapes[first[0]][1:]
        if self.stack_axis == -1:
            return (*matrix[:-1], matrix[-1] * len(self.groups))
        matrix = matrix[::-1] if self.transposed else matrix
        return matrix if self.stack_axis is None else (len(self.groups), *matrix)

    def split_fused(
        self, read_fused: Callable[[], np.ndarray], shapes: Shapes
    ) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        """Yield each logical weight's name with a function that reads it from the fused tensor."""
        for group, names in enumerate(self.groups):
            ends = accumulate((shapes[name][0] for name in names), initial=0)
            for index, (name, rows) in enumerate(zip(names, pairwise(ends), strict=True)):
                selection = slice(index, None, len(names)) if self.interleaved else slice(*rows)
                yield name, partial(self._read_rows, read_fused, group, selection)

    def _read_rows(
        self, read_fused: Callable[[], np.ndarray], group: int, rows: slice
    ) -> np.ndarray:
        """Read a range of rows of one of the fused tensor's matrices."""
        tensor = read_fused()
        if self.stack_axis is not None:
            tensor = (
                tensor[group] if self.stack_axis == 0 else tensor[..., group :: len(self.groups)]
            )
        return (tensor.T if self.transposed else tensor)[rows]

    def fuse_weights(self, weights: Arrays) -> np.ndarray:
        """Fuse logical weights into the tensor that files store."""
        matrices = [
            self._concatenate_matrix([weights[name] for name in names]) for names in self.groups
        ]
        if self.stack_axis is None:
            return matrices[0]
        tensor = np.stack(matrices, self.stack_axis)
        return tensor if self.stack_axis == 0 else tensor.reshape(*tensor.shape[:-2], -1)

    def _concatenate_matrix(self, weights: list[np.ndarray]) -> np.ndarray:
        """Concatenate or interleave the logical weights that form one matrix of a fused tensor."""
        if self.interleaved:
            matrix = np.stack(weights, 1).reshape(-1, *weights[0].shape[1:])
        else:
            matrix = np.concatenate(weights)
        return matrix.T if self.transposed else matrix


@dataclass(frozen=True)
class HfTensorNames:
    """Differences between Hugging Face files' tensors and logical weights, in name and form.

    Attributes:
        aliases: logical name of a weight, by its other name in files.
        fused: fused tensors, by name.
        transposed: aliases whose tensors are the transpose of the weight.
        buffers: weights that files may lack, by name; they then have their initial values.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, FusedWeights] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    buffers: Mapping[str, Weight] = field(default_factory=dict)

    def __or__(self, other: HfTensorNames) -> HfTensorNames:
        return HfTensorNames(
            {**self.aliases, **other.aliases},
            {**self.fused, **other.fused},
            self.transposed | other.transposed,
            {**self.buffers, **other.buffers},
        )

    def subset(self, names: Collection[str]) -> HfTensorNames:
        """Returns the conversion for the named logical weights only."""
        aliases = {alias: name for alias, name in self.aliases.items() if name in names}
        fused = {
            n: x for n, x in self.fused.items() if all(name in names for name in x.weight_names)
        }
        buffers = {name: weight for name, weight in self.buffers.items() if name in names}
        return HfTensorNames(aliases, fused, self.transposed, buffers)

    def from_hf(self, tensors: Arrays, shapes: Shapes) -> Arrays:
        """Convert a file's tensors to logical weights, each when it is read.

        Args:
            shapes: shapes of all weights.

        Raises:
            ValueError: a weight is missing or unknown; on reading, a weight that the file has
                under several names has several values.
        """
        from modelling.weights.mxfp4 import dequantize_tensors

        tensors = dequantize_tensors(tensors)
        names = self._split_names(tensors)
        sources = self._file_names_by_weight(names, shapes)
        read = lru_cache(1)(tensors.__getitem__)  # weights of a fused tensor are consecutive
        readers: dict[str, Callable[[], np.ndarray]] = {
            weight: partial(self._read_weight, tensors, name) for weight, name in sources.items()
        }
        missing = self.buffers.keys() - sources.keys()
        readers |= {name: partial(self.buffers[name].init_values, 0) for name in missing}
        for name, fused in self.fused.items():
            if name in tensors:
                readers |= fused.split_fused(partial(read, name), shapes)
        for name in names:
            weight = self.aliases.get(name)
            if weight is not None and sources[weight] != name:
                copy = partial(self._read_weight, tensors, name)
                readers[weight] = partial(
                    _read_and_check_copy, readers[weight], sources[weight], copy, name
                )
        return LazyArrays(readers)

    def to_hf(self, weights: Arrays) -> Arrays:
        """Convert logical weights to tensors of an exported file; the inverse of `from_hf`."""
        fused = {name: x for name, x in self.fused.items() if x.in_exports}
        fused_weights = {name for x in fused.values() for name in x.weight_names}
        readers = {
            tensor: partial(x.fuse_weights, weights)
            for tensor, x in fused.items()
            if all(name in weights for name in x.weight_names)
        }
        others = [name for name in weights if name not in fused_weights]
        return OverlayArrays(LazyArrays(readers), ArraysView(weights, others))

    def check_shapes(self, file_shapes: Shapes, shapes: Shapes) -> None:
        """Raise WeightsError if names or shapes of a file's tensors do not fit the model.

        Args:
            file_shapes: shapes of the file's tensors.
            shapes: shapes of all weights.

        Raises:
            ValueError: as for `from_hf`, or a tensor has another shape.
        """
        from modelling.weights.mxfp4 import dequantized_shapes

        file_shapes = dequantized_shapes(file_shapes)
        sources = self._file_names_by_weight(self._split_names(file_shapes), shapes)
        for name, fused in self.fused.items():
            if name in file_shapes:
                check_tensor_shape(name, file_shapes[name], fused.fused_shape(shapes))
        for weight, shape in shapes.items():
            if sources.get(weight) in file_shapes:
                source = sources[weight]
                expected = shape[::-1] if source in self.transposed else shape
                check_tensor_shape(source, file_shapes[source], expected)

    def _read_weight(self, tensors: Arrays, name: str) -> np.ndarray:
        """Read a file's tensor, transposed to the logical weight if stored the other way."""
        return tensors[name].T if name in self.transposed else tensors[name]

    def _split_names(self, names: Iterable[str]) -> list[str]:
        """Names of a file's tensors, each fused tensor replaced by its logical weights' names."""
        weights = (
            [name] if name not in self.fused else self.fused[name].weight_names for name in names
        )
        return list(chain.from_iterable(weights))

    def _file_names_by_weight(self, names: Iterable[str], shapes: Shapes) -> dict[str, str]:
        """Map each logical weight to that one of its alternative names which a file has."""
        sources: dict[str, str] = {}
        for name in names:
            weight = self.aliases.get(name, name)
            if weight not in sources or name == weight:
                sources[weight] = name
        missing, unknown = shapes.keys() - sources.keys(), sources.keys() - shapes.keys()
        missing -= self.buffers.keys()
        if missing or unknown:
            raise WeightsError(
                "the weights belong to a model of another kind or size than the configuration's: "
                f"missing {_format_first_name(missing)}, unknown {_format_first_name(unknown)}"
            )
        return sources


def _read_and_check_copy(
    read: Callable[[], np.ndarray], name: str, read_copy: Callable[[], np.ndarray], copy_name: str
) -> np.ndarray:
    """Read a tensor; raise WeightsError if its tied copy has another value."""
    value = read()
    if not np.array_equal(value, read_copy()):
        raise WeightsError(
            f"{name!r} and {copy_name!r} differ, but the configured model has one weight for both"
        )
    return value


def _format_first_name(names: Iterable[str]) -> str:
    """Format the first of several names and how many more there are."""
    first, *others = sorted(names) or ["none"]
    first = format_name(first, 48)  # a sentence has two of them and a path
    return f"{first} and {len(others)} more" if others else first
