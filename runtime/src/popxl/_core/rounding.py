"""Which random numbers an update of a 16-bit variable is rounded with.

The session option `enableStochasticRounding` asks for it. Every update in a run has a number, the
same on all replicas; with the seed of the run it selects a stream of random bits. Numbers are known
before anything runs (a loop takes as many in each iteration), so loops carry nothing, and branches
that replicas take differently leave them at the same number afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from popxl import dtypes

if TYPE_CHECKING:
    from popxl._core.op import Op

_ROUNDED = (dtypes.float16, dtypes.bfloat16)


def is_rounded(op: Op) -> bool:
    """Whether `op` rounds a float32 value to the 16-bit type of the variable it updates."""
    return op.defn.rounds and op.inputs[0].dtype in _ROUNDED
