"""Activations by their names in configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from popxl import Tensor, ops

Activation = Literal["gelu_tanh", "gelu_pytorch_tanh", "relu", "silu"]


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """Return the function of a name: gelu_tanh is the tanh approximation of GELU
    (arXiv:1606.08415), silu is x * sigmoid(x) (arXiv:1702.03118)."""
    functions = ops.gelu, ops.gelu, ops.relu, ops.swish
    return dict(zip(get_args(Activation), functions, strict=True))[name]
