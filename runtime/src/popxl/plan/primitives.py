"""Cost model of JAX primitives: bytes, FLOPs, and how XLA lowers them to kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from popxl.ops._cudnn_attention import BACKWARD, FORWARD
from popxl.ops._kernel_registry import KERNELS

if TYPE_CHECKING:
    from popxl.plan.flat_jaxpr import PrimitiveNode

Kind = Literal["free", "fused", "reduction", "kernel"]

MATERIALISED = frozenset(("xla_metadata_call", "optimization_barrier"))
"""Primitives of `materialise` on CPUs, and on other platforms."""
# Views: they do not copy their operand.
_FREE = MATERIALISED | frozenset(
    "reshape squeeze expand_dims stop_gradient copy_p bitcast_convert_type".split()
)
# Fused data movement, which counts as no arithmetic.
_MOVED = frozenset(
    "broadcast_in_dim iota transpose slice rev pad convert_element_type select_n concatenate "
    "dynamic_slice gather copy reduce_precision".split()
)
_REDUCTIONS = frozenset(
    "dynamic_update_slice reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax "
    "argmin".split()
)
SCATTERS = frozenset("scatter scatter-add scatter_add scatter_max scatter_min".split())
_KERNELS = SCATTERS | frozenset(
    "dot_general conv_general_dilated sort "
    "cumsum cumprod cummax cummin cumlogsumexp reduce_window reduce_window_sum "
    "reduce_window_max select_and_scatter_add select_and_gather_add top_k "
    "ragged_dot random_bits threefry2x32".split()
)
RANDOM_BITS = "rng_bit_generator"
"""CPUs fuse it; elsewhere kernels write its bits to memory."""
PICKS = frozenset("gather dynamic_slice slice".split())
"""Primitives that read as many bytes as they return, not their full operands."""
COLLECTIVES = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "ppermute": "ppermute",
    "all_to_all": "all_to_all",
}


def lowering_of(primitive_name: str, platform: str = "cpu") -> Kind:
    """Returns how XLA lowers a JAX primitive: as a kernel, fused, free, ....

    "free": a view of its operand; "fused": computed where it is used; "reduction": its operand is
    fused into it; "kernel": it reads and writes memory.
    """
    if primitive_name == RANDOM_BITS:
        return "fused" if platform == "cpu" else "kernel"
    if primitive_name in _FREE:
        return "free"
    if primitive_name in _REDUCTIONS:
        return "reduction"
    return (
        "kernel"
        if primitive_name in _KERNELS or primitive_name in COLLECTIVES or primitive_name in KERNELS
        else "fused"
    )


def nbytes(aval: Any) -> int:
    """Returns the bytes of a value of JAX type `aval`; 0 for abstract ones such as tokens."""
    if not hasattr(aval, "shape") or not hasattr(aval.dtype, "itemsize"):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def _is_integer_scalar(aval: Any) -> bool:
    # Random keys have a dtype without a kind.
    return not getattr(aval, "shape", (1,)) and getattr(aval.dtype, "kind", "") in tuple("iub")


def flops_of(node: PrimitiveNode) -> int:
    """Returns the FLOPs of a matmul or convolution, 2 per multiply-add; 0 for other primitives."""
    name, out = node.name, node.outputs[0].aval
    if name in KERNELS:
        return KERNELS[name]([atom.aval.shape for atom in node.atoms])
    if name in ("dot_general", "ragged_dot"):
        (contracted, _), _ = node.params["dimension_numbers"]
        shape = node.atoms[0].aval.shape
        return 2 * math.prod(out.shape) * math.prod(shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = node.atoms[1].aval.shape, node.params["dimension_numbers"]
        taps = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
        return 2 * math.prod(out.shape) * taps * kernel[numbers.rhs_spec[1]]
    return 0


def is_float8(value: Any) -> bool:
    """True if a value's JAX type is float8."""
    return getattr(value.aval.dtype, "name", "").startswith("float8")


def attention_head_dim_and_direction(node: PrimitiveNode) -> tuple[int, bool]:
    """Returns (head dimension, is backward) of a fused-attention kernel; 0 for other nodes."""
    if node.name not in KERNELS or not node.name.startswith((FORWARD, BACKWARD)):
        return 0, False
    return node.atoms[0].aval.shape[-1], node.name.startswith(BACKWARD)


def arithmetic_ops_of(node: PrimitiveNode) -> int:
    """Returns a primitive's arithmetic outside matmuls: an op per element computed or reduced.

    Loop counters and stream positions do not count.
    """
    name = node.name
    if all(_is_integer_scalar(v.aval) for v in node.outputs):
        return 0
    if name in _FREE or name in _MOVED or name in COLLECTIVES or flops_of(node):
        return 0
    kind = lowering_of(name)
    if name in ("dynamic_update_slice", "sort", "top_k"):
        return 0
    sized = node.atoms if kind == "reduction" else node.outputs
    return max((math.prod(v.aval.shape) for v in sized if hasattr(v.aval, "shape")), default=0)
