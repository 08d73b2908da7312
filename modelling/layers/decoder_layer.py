"""The base of the layers of a decoder alone."""

from __future__ import annotations

from collections.abc import Callable

from config.sections import RunConfig
from modelling.layers.decoder_attention import DecoderAttention
from modelling.layers.dropout import Dropout
from modelling.layers.layer import Layer
from modelling.layers.low_rank import seed_adapters
from modelling.layers.parallel import Groups
from popxl import Tensor, TensorSpec

Map = Callable[[Tensor], Tensor]
"""A part of a layer."""

Seeds = tuple[Tensor | None, Tensor | None]
"""For dropout of what attention and feed-forward give."""

NO_SEEDS: Seeds = (None, None)


class DecoderLayer(Layer):
    """A layer with `attention` inside, which subclasses set.

    Attributes:
        added_up: spec of what layers add up besides, as `build(x, sum, segments, ...)` ->
            (x, sum), with int32 (batch, length) that is 0 where a token is padding; None: nothing.
        sum_is_learned: whether the sum has a gradient.

    Generation calls `around` with attention that reads caches.
    """

    attention: DecoderAttention
    added_up: TensorSpec | None = None
    sum_is_learned = False

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.groups = Groups.current(config.execution.tensor_parallel)
        self.dropout = Dropout.of(config.model)

    def build(self, x: Tensor, starts: Tensor | None = None, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            starts: int32 (batch, length), where in its sample each token's text starts; None: a
                sample is one text.
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.
        """
        return self.around(x, *self.attending(starts, seed))

    def attending(self, starts: Tensor | None, seed: Tensor | None) -> tuple[Map, Seeds]:
        """The attention of a whole sample, and the seeds of the rest; arguments as for `build`."""
        seed_adapters(self, seed)
        inside, *seeds = self.dropout.seeds(seed, 3)
        return lambda t: self.attention(t, inside, starts), (seeds[0], seeds[1])

    def around(self, x: Tensor, attend: Map, seeds: Seeds = NO_SEEDS) -> Tensor:
        """The layer around some attention.

        Args:
            attend: what the attention reads -> this replica's part of it.
        """
        raise NotImplementedError
