"""Experts' weights, of which files may have those of a layer as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from checkpoints.arrays import Arrays


@dataclass(frozen=True)
class Stacked:
    """Weights that files have as one, a matrix for each group of them: experts' maps.

    Attributes:
        groups: the weights of each matrix, joined along their first axis. Weights that are vectors
            make vectors.
        alternating: whether it has their rows in turn, not those of one after those of another.
        transposed: whether matrices are (in features, out features).
        written: whether it is so in the files of exports, too.
        behind: whether groups are along the last axis of a matrix, an element of each in turn.
    """

    groups: tuple[tuple[str, ...], ...]
    alternating: bool = False
    transposed: bool = False
    written: bool = False
    behind: bool = False

    @property
    def weights(self) -> list[str]:
        """The weights of all matrices."""
        return list(chain(*self.groups))

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole, whose weights have the shape `weight`."""
        rows, *rest = weight
        one = (len(self.groups[0]) * rows, *rest)
        if self.behind:
            return (*one[:-1], one[-1] * len(self.groups))
        return (len(self.groups), *(one[::-1] if self.transposed else one))

    def part(self, whole: np.ndarray, group: int, place: int) -> np.ndarray:
        """A weight of a group."""
        matrix = whole[..., group :: len(self.groups)] if self.behind else whole[group]
        count = len(self.groups[group])
        matrix = matrix.T if self.transposed else matrix
        if self.alternating:
            return matrix[place::count]
        rows = matrix.shape[0] // count
        return matrix[place * rows : (place + 1) * rows]

    def join(self, weights: Arrays) -> np.ndarray:
        """The whole."""
        matrices = [self._matrix([weights[n] for n in names]) for names in self.groups]
        whole = np.stack(matrices, -1 if self.behind else 0)
        return whole.reshape(*whole.shape[:-2], -1) if self.behind else whole

    def _matrix(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        if self.alternating:
            matrix = np.stack(parts, 1).reshape(-1, *parts[0].shape[1:])
        else:
            matrix = np.concatenate(parts)
        return matrix.T if self.transposed else matrix
