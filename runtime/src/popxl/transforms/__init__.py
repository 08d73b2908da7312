"""Transforms of graphs: autodiff, recomputation policies, outlining, scheduling hints."""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from popxl.transforms.autodiff import ExpectedConnection as ExpectedConnection
    from popxl.transforms.autodiff import ExpectedConnectionType as ExpectedConnectionType
    from popxl.transforms.autodiff import GradGraphInfo as GradGraphInfo
    from popxl.transforms.autodiff import (
        accumulate_weight_gradients_in as accumulate_weight_gradients_in,
    )
    from popxl.transforms.autodiff import autodiff as autodiff
    from popxl.transforms.decompose_sum import decompose_sum as decompose_sum
    from popxl.transforms.gradient_ops import tensors_with_max_gradient as tensors_with_max_gradient
    from popxl.transforms.merge_exchange import io_tile_exchange as io_tile_exchange
    from popxl.transforms.merge_exchange import merge_exchange as merge_exchange
    from popxl.transforms.outline import outline as outline
    from popxl.transforms.saveable import matmul_inputs_saveable as matmul_inputs_saveable
    from popxl.transforms.saveable import matmul_operands_saveable as matmul_operands_saveable
    from popxl.transforms.saveable import products_saveable as products_saveable
    from popxl.transforms.saveable import save_policy as save_policy
else:
    lazy_exports(__name__)
