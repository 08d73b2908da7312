"""What XLA on CPU can compute element by element, and what it costs to do so more than once.

The rules are those of cpu_instruction_fusion.cc and instruction_fusion.cc.
"""

from __future__ import annotations

from popxl.plan.values import Node, Value

_LIBRARY = frozenset(
    """dot_general conv_general_dilated sort scatter scatter_add scatter-add scatter_mul top_k
    cumsum cumprod cummax cummin while scan cond random_bits threefry2x32 random_seed random_wrap
    random_unwrap random_fold_in reduce_window_max reduce_window_sum argmax argmin
    rng_bit_generator custom_call pallas_call""".split()
)
_EXPENSIVE = frozenset(
    "exp exp2 expm1 log log1p logistic pow rsqrt sqrt cbrt tanh tan sin cos erf erfc erf_inv "
    "atan2 gather".split()  # of gathers: as compiled programs have them
)
_SPREADS = frozenset(("broadcast_in_dim", "broadcast", "iota"))
_REPEATS = frozenset(("broadcast_in_dim", "broadcast", "gather"))  # read elements several times
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())
_LONG_ROW = 128  # elements: joining shorter rows is computed element by element


def is_loop(node: Node) -> bool:
    """Whether a node computes its one output element by element."""
    if node.kind != "primitive" or node.name in _LIBRARY or len(node.outputs) != 1:
        return False
    if node.name == "concatenate":
        return not _joins_rows(node)
    return node.name not in _REDUCTIONS or _along_rows(node)


def _joins_rows(node: Node) -> bool:
    """Whether a node joins arrays along a long last axis, which XLA on CPU does by copying."""
    shape = node.outputs[0].shape
    return 1 < len(shape) == node.facts["dimension"] + 1 and shape[-1] >= _LONG_ROW


def takes_in(reader: Node) -> bool:
    """Whether a node computes its inputs element by element."""
    return reader.kind == "store" or is_loop(reader)


def is_expensive(node: Node) -> bool:
    """Whether an element of a node costs more than reading it from memory."""
    return node.name in _EXPENSIVE


def reads_again(node: Node) -> bool:
    """Whether a node reads an element of its inputs several times."""
    return node.name in _REPEATS


def is_repeated(node: Node) -> bool:
    """Whether a value that is in memory is computed again where that can be done."""
    if not is_loop(node) or is_expensive(node) or node.name in _REDUCTIONS:
        return False
    return is_unary(node)


def is_unary(node: Node) -> bool:
    """Whether computing a node in several places reads hardly more than reading its value would."""
    out = node.outputs[0]
    large = [v for v in node.inputs if len(v.shape) >= len(out.shape) and not _is_spread(v, node)]
    return len(large) <= 1 or sum(v.nbytes for v in {*node.inputs}) <= out.nbytes


def _is_spread(value: Value, node: Node) -> bool:
    """Whether a node reads a value that is smaller in memory, once for many elements."""
    maker, shape = value.producer, node.outputs[0].shape
    if maker is not None and maker.name in _SPREADS:
        return True
    pairs = zip(value.shape, shape, strict=True) if len(value.shape) == len(shape) else ()
    elementwise = node.name not in ("concatenate", "pad") and value.shape != shape
    return elementwise and bool(shape) and all(own in (1, size) for own, size in pairs)


def _along_rows(node: Node) -> bool:
    """Whether a reduction is over the last axis; XLA on CPU keeps others to themselves."""
    rank = len(node.inputs[0].shape)
    return rank - 1 in node.facts.get("axes", ())
