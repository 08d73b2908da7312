"""Ops for creation, placement, copies and printing: mostly identities on XLA."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl import context, dtypes
from popxl._analysis.effects import Effects
from popxl._ir.op import Op
from popxl._ir.op_registry import NoGrad, define
from popxl._ir.sharding import MetaShape
from popxl.ops._emit import emit
from popxl.ops._reductions import traced_platform
from popxl.tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from popxl._analysis.functionalization import Node
    from popxl._analysis.tracer_protocol import TracerProtocol
    from popxl.graph import Graph


# ---- init ---------------------------------------------------------------------------------------
INIT = define(
    "init",
    lambda shape, dtype, meta_shape, init_type: jnp.zeros(shape, dtype.as_jax()),
    infer=lambda shape, dtype, meta_shape, init_type: [TensorSpec(shape, dtype, meta_shape)],
    grad=NoGrad("no inputs"),
    tags=("zeros",),
)


def init(
    shape: Iterable[int],
    dtype: dtypes.dtype,
    name: str | None = None,
    init_type: Literal["zero", "undef"] = "zero",
    meta_shape: Iterable[int] | None = None,
) -> Tensor:
    """Creates a tensor of zeros, or of undefined values (which are zeros here as well).

    Raises:
        ValueError: an unknown `init_type`.
    """
    if init_type not in ("zero", "undef"):
        raise ValueError(f"init_type must be 'zero' or 'undef', but is {init_type!r}")
    attrs = {"shape": tuple(shape), "dtype": dtype, "meta_shape": MetaShape(meta_shape or ()),
             "init_type": init_type}  # fmt: skip
    return emit(INIT, [], attrs, names=[name] if name else ())[0]


# ---- values in memory ---------------------------------------------------------------------------
def materialize_array(x: jax.Array) -> jax.Array:
    """Returns an array behind an optimization barrier, across which XLA fuses nothing."""
    if traced_platform() != "cpu":
        return lax.optimization_barrier(x)
    from jax.experimental.scheduling_groups import xla_metadata_call

    # On CPU, XLA takes barriers away before it fuses. A function that must not be inlined stays,
    # and is not even a copy.
    return xla_metadata_call(lambda y: y, inlineable="false")(x)


def unfused_update(update: jax.Array) -> jax.Array:
    """Keeps XLA from fusing the computation of a variable's update into the kernel that writes it.

    On CPU that kernel writes in place, and XLA fuses an update into it that is a shifted part of
    the same array behind a reshape: it then reads what it has overwritten (openxla/xla#49176).
    """
    return materialize_array(update) if traced_platform() == "cpu" else update


_MATERIALISE = define(
    "materialise", materialize_array, infer=lambda spec: [spec], grad=lambda ctx, op, dy: [dy]
)


def materialise(t: Tensor) -> Tensor:
    """Returns the same value, written to memory once instead of recomputed at each use.

    For values that are dear to compute for each element, such as those picked by index arithmetic,
    and used more than once. What stands before and after is not fused.
    """
    return emit(_MATERIALISE, [t])[0]


# ---- copies between devices and tile sets -------------------------------------------------------
def _ipu_copy_grad(ctx: Any, op: Op, dy: Tensor | None) -> Sequence[Tensor | None]:
    assert dy is not None
    return [ipu_copy(dy, op.attrs["source"], op.attrs["destination"])]


_IPU_COPY = define(
    "ipu_copy",
    lambda x, source, destination: x,
    infer=lambda spec, **_: [spec],
    grad=_ipu_copy_grad,
    result=lambda op: [f"{{t}}_c{op.attrs['destination']}"],
)


def ipu_copy(t: Tensor, destination: int, source: int | None = None) -> Tensor:
    """Copies a tensor to another virtual device (an identity here: XLA has one per replica).

    Args:
        source: device of `t`; default: where it is.

    Raises:
        ValueError: the source is not given and not known.
    """
    if source is None:
        source = t._known_ipu()
        if source is None:
            raise ValueError(f"ipu_copy: the IPU of {t.id!r} is not known; give `source`")
    out = emit(_IPU_COPY, [t], {"source": source, "destination": destination})[0]
    out._ipu = destination
    return out


_TILE_COPY = define(
    "io_tile_copy",
    lambda x: x,
    infer=lambda spec: [spec],
    grad=lambda ctx, op, dy: [io_tile_copy(dy)],
    result="{t}_iotilecopy",
)


def io_tile_copy(t: Tensor) -> Tensor:
    """Copies a tensor between IO and compute tiles (an identity here)."""
    out = emit(_TILE_COPY, [t])[0]
    out._tile_set = "compute" if t._tile_set == "io" else "io"
    return out


# ---- code loading -------------------------------------------------------------------------------
CODE_LOCATION = Literal["executable", "compute_buffer", "io_buffer"]
TO_IR_ENUM_MAP = {name: name for name in ("executable", "compute_buffer", "io_buffer")}

_CODE_COPY = define(
    "code_copy",
    tags=("hint",),
    execute=lambda tracer, node, arrays: [],
    infer=lambda **_: [],
    grad=NoGrad("moves code, not data"),
)


def remote_code_load(graph: Graph, destination: CODE_LOCATION) -> None:
    """Loads the code of `graph` from remote memory (recorded; XLA keeps code where it runs).

    Args:
        destination: "executable": where code runs.

    Raises:
        ValueError: an unknown destination, or `graph` is the one that is being written.
        NotImplementedError: another destination.
    """
    if destination not in TO_IR_ENUM_MAP:
        raise ValueError(
            f"unknown code location {destination!r}: use one of {list(TO_IR_ENUM_MAP)}"
        )
    if destination != "executable":
        raise NotImplementedError(f"code is loaded to the executable, not to {destination!r}")
    if graph is context.get_current_graph():
        raise ValueError(f"graph {graph.id!r} cannot load its own code: load it where it is called")
    emit(_CODE_COPY, [], {"code_of": graph.id, "source": "remote", "destination": destination})


def code_copy(graph: Graph, source: CODE_LOCATION, destination: CODE_LOCATION) -> None:
    """Copies the code of `graph` between a device's memories (recorded; here there is one).

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("code has one place on a device: use ops.remote_code_load")


# ---- printing -----------------------------------------------------------------------------------
class PrintTensorFmt:
    """Number format of `print_tensor`; its fields are that function's arguments."""

    def __init__(
        self,
        summariseThreshold: int = 1000,  # noqa: N803 - PopART's names
        edgeItems: int = 3,  # noqa: N803
        maxLineWidth: int = 75,  # noqa: N803
        digits: int = 8,
        floatFormat: str = "auto",  # noqa: N803
        separator: str = " ",
        openBracket: str = "[",  # noqa: N803
        closeBracket: str = "]",  # noqa: N803
    ) -> None:
        self.options = {
            "threshold": summariseThreshold,
            "edgeitems": edgeItems,
            "max_line_width": maxLineWidth,
            "precision": digits,
            "separator": separator,
            "suppress_small": floatFormat == "fixed",
        }
        self.brackets = openBracket, closeBracket

    def format(self, value: np.ndarray) -> str:
        text = np.array2string(value, **self.options)  # type: ignore[arg-type]
        return text.replace("[", self.brackets[0]).replace("]", self.brackets[1])


FloatFormat = Literal["auto", "fixed", "scientific", "none"]
FLOAT_FORMAT_MAP = {name: name for name in ("auto", "fixed", "scientific", "none")}


def _execute_print(tracer: TracerProtocol, node: Node, arrays: Sequence[Any]) -> Sequence[Any]:
    """Prints a tensor to stderr by `jax.debug.callback`."""
    (value,), op = arrays, node.op
    assert op is not None
    title, fmt = op.attrs["title"], PrintTensorFmt(*op.attrs["fmt"])
    if op.attrs["print_self"]:
        if value.dtype.itemsize < 4 and jnp.issubdtype(value.dtype, jnp.floating):
            printable = value.astype(jnp.float32)
        else:
            printable = value

        def print_value(x: Any) -> None:
            print(f"{title}: {fmt.format(np.asarray(x))}", file=sys.stderr, flush=True)

        jax.debug.callback(print_value, printable, ordered=False)
    return arrays


def _print_grad(ctx: Any, op: Op, dy: Tensor | None) -> Sequence[Tensor | None]:
    assert dy is not None
    if not op.attrs["print_gradient"]:
        return [dy]
    attrs = {**op.attrs, "title": op.attrs["title"] + "_gradient", "print_self": True,
             "print_gradient": False}  # fmt: skip
    return [emit(_PRINT, [dy], attrs)[0]]


_PRINT = define(
    "print_tensor",
    execute=_execute_print,
    infer=lambda spec, **_: [spec],
    grad=_print_grad,
    effects=lambda op: Effects(impure=True),
)


def print_tensor(
    t: Tensor,
    title: str | None = None,
    print_self: bool = True,
    print_gradient: bool = False,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 75,
    digits: int = 8,
    float_format: FloatFormat = "auto",
    separator: str = " ",
    open_bracket: str = "[",
    close_bracket: str = "]",
) -> Tensor:
    """Prints a tensor to stderr each time the op runs, and returns it.

    Use the result (or the tensor) afterwards as usual.

    Args:
        title: text before the value; default: `print_` and the tensor's name.
        print_self: print the value.
        print_gradient: print the gradient that flows through the result.
        summarise_threshold: sizes above it are summarised, with `edge_items` at each end.
        digits: digits after the point.
    """
    if float_format not in FLOAT_FORMAT_MAP:
        raise ValueError(f"unknown float_format {float_format!r}")
    fmt = (summarise_threshold, edge_items, max_line_width, digits, float_format, separator,
           open_bracket, close_bracket)  # fmt: skip
    attrs = {"title": title or f"print_{t.name}", "print_self": print_self,
             "print_gradient": print_gradient, "fmt": fmt}  # fmt: skip
    return emit(_PRINT, [t], attrs)[0]
