"""Views far from their owners: one op that picks elements, in place of a chain of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from popxl._core.opdef import define

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.tensor import Tensor


def _joined(arrays: Sequence[Any]) -> Any:
    return jnp.concatenate([jnp.reshape(x, -1) for x in arrays])


def _read(*owners: Any, elements: np.ndarray) -> Any:
    return _joined(owners)[elements]


def _write(owners: tuple[Any, ...], value: Any, elements: np.ndarray) -> tuple[Any, ...]:
    joined = _joined(owners).at[elements].set(value)
    parts = jnp.split(joined, np.cumsum([x.size for x in owners])[:-1])
    return tuple(part.reshape(x.shape) for part, x in zip(parts, owners, strict=True))


_PICK = define("pick", _read, view_write=_write)


def picked(t: Tensor, chain: Sequence[Tensor], view_of: Callable[[Tensor], Op | None],
           root: Callable[[Tensor], Tensor]) -> Op:  # fmt: skip
    """An op that does what a chain of views does: `t` picks elements of its owners.

    Args:
        chain: `t` and all that it is a view of, each after what it is a view of.
        view_of: the op by which a tensor is a view; None: it owns its storage.
        root: the tensor that an input of such an op is.
    """
    shown: dict[Tensor, np.ndarray] = {}
    owners: list[Tensor] = []
    with jax.ensure_compile_time_eval():
        for part in chain:
            op = view_of(part)
            if op is None:
                first = sum(owner.nelms for owner in owners)
                shown[part] = first + np.arange(part.nelms, dtype=np.int32).reshape(part.shape)
                owners.append(part)
            else:
                assert op.defn.lower is not None
                inputs = [shown[root(p)] for p in op.inputs]
                shown[part] = np.asarray(op.defn.lower(*inputs, **op.attrs))
    found = copy(view_of(t))
    assert found is not None
    found.defn, found.inputs, found.attrs = _PICK, owners, {"elements": shown[t]}
    return found
