"""User-defined ops: JAX functions as PopXL ops, in place of PopART's custom ops in C++."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

import jax

from popxl._ir.op_registry import NoGrad, OpDef, define, registry
from popxl.lazy_exports import exported_names, load_all
from popxl.ops._emit import emit
from popxl.tensor import Tensor

__all__ = ["jax_op"]

JaxFunction = Callable[..., Any]
# grad(inputs, outputs, output gradients, **attributes) -> a gradient, or None, of each input
JaxGradient = Callable[..., Any]


@overload
def jax_op(function: JaxFunction, /) -> Callable[..., Any]: ...
@overload
def jax_op(
    *,
    name: str | None = None,
    inplace: str | None = None,
    grad: JaxGradient | None = None,
    no_grad: str | None = None,
) -> Callable[[JaxFunction], Callable[..., Any]]: ...
def jax_op(
    function: JaxFunction | None = None,
    /,
    *,
    name: str | None = None,
    inplace: str | None = None,
    grad: JaxGradient | None = None,
    no_grad: str | None = None,
) -> Any:
    """Decorator that makes a PopXL op of a JAX function: `@jax_op` or `@jax_op(...)`.

    The op takes a tensor for each positional parameter of the function (any number for `*xs`), and
    its keyword-only parameters as attributes: fixed, hashable values. It returns a tensor, or a
    tuple if the function returns several arrays. Shapes and dtypes are those of the function, which
    must be pure; there is no implicit conversion.

    Its gradient is JAX's, so a `jax.custom_vjp` inside counts.

    Args:
        name: shown by `print(graph)`; default: the function's module and name.
        inplace: parameter whose tensor the (first) result overwrites; the op returns that tensor
            with its new value.
        grad: gradient to use instead of JAX's: `grad(inputs, outputs, dys, **attributes)` gets
            tuples of arrays and returns the gradient of each input, None for zero.
        no_grad: the reason why the op has no gradient; its inputs then receive none.

    Raises:
        ValueError: `inplace` names no positional parameter, or both `grad` and `no_grad` are given.

    Example:
        >>> @jax_op
        ... def attend(q, k, *, scale=1.0):
        ...     return jnp.einsum("bqd,bkd->bqk", q, k) * scale
        >>> scores = attend(q, k, scale=0.125)  # in a graph; q and k are popxl tensors
    """
    if grad is not None and no_grad is not None:
        raise ValueError("jax_op: give `grad` or `no_grad`, not both")

    def decorate(function: JaxFunction) -> Callable[..., Any]:
        defn = _define_op(function, name, grad, no_grad)
        return _create_op_function(function, defn, inplace)

    return decorate if function is None else decorate(function)


# ---- the definition -----------------------------------------------------------------------------
def _define_op(
    function: JaxFunction, name: str | None, grad: JaxGradient | None, no_grad: str | None
) -> OpDef:
    module = getattr(function, "__module__", None) or ""
    own_name = getattr(function, "__name__", type(function).__name__)
    return define(
        _unused_op_name(name or f"{module.rpartition('.')[2]}.{own_name}"),
        function if grad is None else _with_gradient(function, grad),
        grad=None if no_grad is None else NoGrad(no_grad),
        # The package it is written in decides how the executable cache recognises it.
        home=module,
    )


def _unused_op_name(name: str) -> str:
    """Returns `name`, with a number appended if another op has it already."""
    function = name.removesuffix("_grad")
    packages = ("popxl.ops", "popxl.ops.collectives", "popxl.ops.var_updates")
    if {function, f"{function}_"} & {n for p in packages for n in exported_names(p)}:
        load_all("popxl.ops")  # names of ops that are not imported yet are taken, too
    taken, candidate, number = registry(), name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


def _with_gradient(function: JaxFunction, grad: JaxGradient) -> JaxFunction:
    @functools.wraps(function)
    def lower(*inputs: Any, **attributes: Any) -> Any:
        @jax.custom_vjp
        def with_rule(*xs: Any) -> Any:
            return function(*xs, **attributes)

        def forward(*xs: Any) -> Any:
            ys = function(*xs, **attributes)
            return ys, (xs, ys)

        def backward(residuals: Any, dys: Any) -> tuple[Any, ...]:
            xs, ys = residuals
            dxs = grad(xs, _as_tuple(ys), _as_tuple(dys), **attributes)
            return _as_tuple(dxs)

        with_rule.defvjp(forward, backward)
        return with_rule(*inputs)

    return lower


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


# ---- the function that programs call ------------------------------------------------------------
_TENSORS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def _create_op_function(
    function: JaxFunction, defn: OpDef, inplace: str | None
) -> Callable[..., Any]:
    signature = inspect.signature(function)
    positional = [n for n, p in signature.parameters.items() if p.kind in _TENSORS]
    if inplace is not None and inplace not in positional:
        raise ValueError(
            f"jax_op: {defn.name} has no positional parameter {inplace!r} to overwrite; it has "
            f"{', '.join(positional)}"
        )
    target = None if inplace is None else positional.index(inplace)

    @functools.wraps(function)
    def op(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{defn.name}: {error}") from None
        bound.apply_defaults()
        for given, value in zip(_argument_names(signature, bound.args), bound.args, strict=True):
            _check_tensor(defn.name, given, value)
        for attribute, value in bound.kwargs.items():
            _check_attribute(defn.name, attribute, value)
        outputs = emit(defn, bound.args, bound.kwargs, inplace=target)
        return outputs[0] if len(outputs) == 1 else outputs

    op.__annotations__ = {}  # those of the function speak of arrays
    return op


def _argument_names(signature: inspect.Signature, args: tuple[Any, ...]) -> list[str]:
    names = [n for n, p in signature.parameters.items() if p.kind in _TENSORS]
    return [*names, *names[-1:] * len(args)][: len(args)]


def _check_tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{op}: parameter {name!r} takes a tensor, but got {value!r}; make it keyword-only to "
            "make it an attribute, or pass popxl.constant(...)"
        )


def _check_attribute(op: str, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        raise TypeError(
            f"{op}: attribute {name!r} got a tensor: tensors go to positional parameters"
        )
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{op}: attribute {name!r} must be hashable, such as a number or a tuple, but got a "
            f"{type(value).__name__}"
        ) from None
