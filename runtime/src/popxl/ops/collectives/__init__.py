"""Collectives among replicas, and among the virtual devices of a replica."""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from popxl.ops.collectives.all_reduce import all_reduce as all_reduce
    from popxl.ops.collectives.all_reduce import (
        all_reduce_identical_grad_inputs as all_reduce_identical_grad_inputs,
    )
    from popxl.ops.collectives.all_reduce import (
        all_reduce_identical_inputs as all_reduce_identical_inputs,
    )
    from popxl.ops.collectives.collectives import CommGroup as CommGroup
    from popxl.ops.collectives.collectives import CommGroupType as CommGroupType
    from popxl.ops.collectives.replicated import replica_sharded_slice as replica_sharded_slice
    from popxl.ops.collectives.replicated import replicated_all_gather as replicated_all_gather
    from popxl.ops.collectives.replicated import replicated_all_reduce as replicated_all_reduce
    from popxl.ops.collectives.replicated import replicated_all_reduce_ as replicated_all_reduce_
    from popxl.ops.collectives.replicated import (
        replicated_reduce_scatter as replicated_reduce_scatter,
    )
    from popxl.ops.collectives.replicated import replicated_slice as replicated_slice
else:
    lazy_exports(__name__)
