"""Policies that choose which forward values gradient graphs save, and which they recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from popxl._ir.op import Op

_CHEAP = frozenset(("elementwise", "reduction", "movement"))
_MATMULS = frozenset(("matmul", "fp8_linear", "fp8_linear_current"))  # inputs: x, ...
_COMPUTE_INPUTS = frozenset(("gelu", "geluerf", "relu", "swish", "fp8_operand"))
_DEAR = frozenset(("dropout",))  # random bits cost more than the memory they would take

Policy = Callable[[Op], bool]
_policy: ContextVar[Policy | None] = ContextVar("saveable", default=None)


def products_saveable(op: Op) -> bool:
    """True for ops with expensive results: matmuls, softmax, random numbers, collectives, calls.

    What is made of them element by element, by sums along axes, or by moving elements is computed
    again where a gradient needs it: writing it to memory and reading it back takes longer. (Compare
    `dots_saveable` of `jax.checkpoint_policies`.)
    """
    return op.defn.name in _DEAR or _CHEAP.isdisjoint(op.defn.tags)


def matmul_inputs_saveable(op: Op) -> bool:
    """True also for outputs of activation functions and gates that a matmul reads; in FP8 for all.

    The matmul's gradient reads it again: where there is memory, no kernel computes it twice. In FP8
    that is the float8 value, with its scale and amax. A norm has to be computed again anyway, for
    its own gradient.
    """
    if products_saveable(op):
        return True
    is_gate = op.defn.name == "mul" and op.inputs[0].spec == op.inputs[1].spec
    is_input = is_gate or op.defn.name in _COMPUTE_INPUTS
    readers = (user for user in op.graph._ops if user.defn.name in _MATMULS)
    return is_input and any(user.inputs[0] in op.outputs for user in readers)


def matmul_operands_saveable(op: Op) -> bool:
    """True also for FP8 weights, which are then rounded once for both directions.

    For passes of one micro-batch: each micro-batch saves its own.
    """
    return op.defn.name == "fp8_operand" or matmul_inputs_saveable(op)


@contextmanager
def save_policy(policy: Policy | None) -> Iterator[None]:
    """Context in which gradient graphs save only inputs and results of ops with `policy(op)`.

    Other values that they need from their forward graphs they recompute.

    Args:
        policy: for example `products_saveable`; None: every value may be taken.
    """
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def may_save(op: Op) -> bool:
    """True if the current save policy lets gradient graphs save the results of `op`."""
    policy = _policy.get()
    return policy is None or policy(op)
