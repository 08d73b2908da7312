"""Activation functions by their names in configurations, such as "gelu"."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from popxl import Tensor, ops

_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": ops.geluerf,
    "gelu_new": ops.gelu,
    "gelu_tanh": ops.gelu,
    "gelu_pytorch_tanh": ops.gelu,
    "relu": ops.relu,
    "silu": ops.swish,
}


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the activation function of a configuration's name for it, such as "silu".

    gelu_tanh and gelu_new are the tanh approximation of GELU (arXiv:1606.08415), silu is
    x * sigmoid(x) (arXiv:1702.03118).
    """
    return _FUNCTIONS[name]
