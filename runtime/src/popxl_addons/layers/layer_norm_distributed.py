"""Layer normalisation of features sharded over replicas."""

from __future__ import annotations

import popxl
from popxl import ReplicaGrouping
from popxl_addons.layers.initialisers import ones, zeros
from popxl_addons.module import Module
from popxl_addons.ops.layer_norm_distributed import layer_norm_distributed


class LayerNormDistributed(Module):
    """Layer normalisation over features that are sharded over a tensor-parallel group.

    Variables: `weight` and `bias`, both (features / parts,). The replicas that share them are the
    transpose of `replica_grouping`, so that host data are (parts, features / parts).

    Args:
        replica_grouping: replicas over which the features are cut, as many parts as a group has
            replicas; default: all replicas.
    """

    def __init__(self, replica_grouping: ReplicaGrouping | None = None) -> None:
        super().__init__()
        self.replica_grouping = replica_grouping

    def build(self, x: popxl.Tensor, eps: float = 1e-05) -> popxl.Tensor:
        """Normalise a replica's features: (..., features / group size) -> the same shape."""
        grouping = self.replica_grouping or popxl.gcg().ir.replica_grouping()
        shape, sharing = x.shape[-1:], grouping.transpose()
        w = self.add_variable_input("weight", ones(shape), x.dtype, replica_grouping=sharing)
        b = self.add_variable_input("bias", zeros(shape), x.dtype, replica_grouping=sharing)
        return layer_norm_distributed(x, w, b, eps, grouping)
