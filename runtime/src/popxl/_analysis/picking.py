"""Views far from their owners: one op that picks elements, in place of a chain of views."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from popxl._analysis.aliases import Views, numbered
from popxl._ir.opdef import define

if TYPE_CHECKING:
    from popxl._ir.op import Op
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


def picked(t: Tensor, views: Views) -> Op:
    """An op that does what a chain of views does: `t` picks elements of its owners."""
    owners = views.owners(t)
    first = dict(zip(owners, accumulate((o.nelms for o in owners), initial=0), strict=False))
    pick = copy(views.op(t))
    assert pick is not None
    elements = views.shown(t, lambda owner: numbered(owner, first[owner]))
    pick.defn, pick.inputs, pick.attrs = _PICK, owners, {"elements": elements}
    return pick
