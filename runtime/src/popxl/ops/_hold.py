"""An op that keeps what computes a value apart from what uses it.

What XLA makes of a computation depends on what surrounds it. It merges neighbouring kernels, in
which a product and a sum then round once instead of twice. It simplifies: 1 / sqrt(x) becomes
rsqrt(x) if nothing else uses the root. It shares what two places compute alike. So the same graph
gives other last bits in another program. None of this crosses a held value.

It costs what it takes to write the value out, where XLA would otherwise have computed it inside of
its uses, and nothing where it is written out anyway.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from popxl._core.opdef import define
from popxl.ops._folds import traced_for


def _hold(x: Any) -> Any:
    if traced_for() != "cpu":
        return lax.optimization_barrier(x)
    from jax.experimental.scheduling_groups import xla_metadata_call

    # On CPU, XLA takes such barriers away before it merges kernels. A function that returns its
    # argument stays, if it must not be inlined, and is not even a copy.
    return xla_metadata_call(lambda y: y, inlineable="false")(x)


HOLD = define("hold", _hold, infer=lambda spec: [spec], grad=lambda ctx, op, dy: [dy])
