"""T5's feed-forward layer by itself."""

from __future__ import annotations

from config.t5 import T5Config
from modelling.layers import BlockContext
from modelling.layers.layer_wrapper import LayerWrapper
from modelling.t5.model import T5MLP
from popxl import Tensor
from tests.modelling.standalone_modules import StandaloneModule


class LayerAlone(LayerWrapper):
    def build(self, x: Tensor) -> Tensor:
        return self.layer(x, BlockContext())


def feed_forward(
    hidden: int, inner: int, scale: float, tensor_parallel: int = 1, precision: str = "float32"
) -> StandaloneModule:
    """A gated feed-forward layer, x: (batch, length, hidden) -> the same shape."""
    attention = {"heads": tensor_parallel, "d_kv": 2}
    model = {"hidden_size": hidden, "d_ff": inner, "scale_ff": scale, "precision": precision}
    config = T5Config.from_dict(
        {
            "model": model | {"attention": attention},
            "execution": {"tensor_parallel": tensor_parallel},
        }
    )
    return StandaloneModule(config, lambda: LayerAlone(T5MLP(config.model)))
