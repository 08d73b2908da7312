"""The base of all layers, and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
import popxl_addons as addons
from config.model import FewBits
from modelling.quantisation import PART_DTYPES, PARTS, packed_shapes, unpacked
from popxl import ReplicaGrouping, Tensor, ops


class Layer(addons.Module):
    """A module whose variables get their values from the model's weight table.

    Attributes:
        inside: the adapters that need a seed, of a whole layer; see `seed_adapters`.
    """

    inside: tuple[Any, ...] = ()

    def weight(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: popxl.dtype,
        grouping: ReplicaGrouping | None = None,
    ) -> Tensor:
        """Add an input for a variable.

        The factory's data are zeros that take no memory: initial values are random numbers that
        belong to the whole model and not to a shard of it (see modelling.weights), and a graph can
        be built, and its memory planned, for weights too large for this machine.

        Args:
            shape: of a replica's part.
            grouping: replicas that hold the same part; default: all.
        """
        zeros = np.broadcast_to(np.zeros((), dtype.as_numpy()), shape)
        return self.add_variable_input(name, zeros, dtype, replica_grouping=grouping)

    def packed_weight(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: popxl.dtype,
        grouping: ReplicaGrouping,
        few_bits: FewBits | None,
        axis: int = 0,
    ) -> Tensor:
        """The matrix of a variable, which may be in few bits: see `modelling.quantisation`.

        Args:
            few_bits: None: it is held as it is.
            axis: that of the input features.
        """
        if few_bits is None:
            return self.weight(name, shape, dtype, grouping)
        shapes = packed_shapes(shape, few_bits, axis)
        parts = [
            self.weight(f"{name}.{part}", s, d, grouping)
            for part, s, d in zip(PARTS, shapes, PART_DTYPES, strict=True)
        ]
        return unpacked(parts, few_bits, dtype, axis)


def cast(x: Tensor, dtype: popxl.dtype) -> Tensor:
    """`x` in `dtype`; `x` itself if it has that dtype."""
    return x if x.dtype == dtype else ops.cast(x, dtype)
