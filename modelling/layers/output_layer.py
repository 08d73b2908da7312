"""Output layers of sequences: one vector for each, and the choice between them and an LM head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.head_loss import HeadLoss
from modelling.layers.lm_head_loss import LMHeadLoss
from modelling.layers.module import Module, cast_if_needed, parameter
from modelling.layers.run_config import current_run_config
from popxl import Tensor, float32

if TYPE_CHECKING:
    from modelling.layers.experts import ExpertUsage


class ReplicatedLinear(Module):
    """A linear layer in float32 that is equal on all replicas: y = x @ weight + bias.

    Args:
        std: of the initial weights.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        std: float,
        bias: bool = True,
        hf_name: str | None = None,
    ) -> None:
        super().__init__(hf_name)
        self.has_bias = bias
        self.weight = parameter(out_features, in_features, std=std, transposed=True)
        if bias:
            self.bias = parameter(out_features, std=0.0)

    def build(self, x: Tensor) -> Tensor:
        """Applies the layer: float32 (..., in_features) -> float32 (..., out_features)."""
        y = x @ cast_if_needed(self.weight, float32)
        return y + cast_if_needed(self.bias, float32) if self.has_bias else y


class PooledHeadLoss(HeadLoss):
    """The output layer of sequences: one vector for each, perhaps a head, and the loss.

    Args:
        norm, norm_name, dropout, expert_usage: see `HeadLoss`.
        head: computes the objective's statistics from float32 (sequences, hidden); None: the
            vectors are the statistics.
    """

    def __init__(
        self,
        norm: Module | None,
        norm_name: str,
        head: Module | None,
        dropout: Dropout = NO_DROPOUT,
        expert_usage: ExpertUsage | None = None,
    ) -> None:
        super().__init__(norm, norm_name, dropout, expert_usage)
        self._has_head = head is not None
        if head is not None:
            self.classifier = head

    def loss_stats(self, features: Tensor, token_inputs: Mapping[str, Tensor]) -> Tensor:
        """Pools the features of each sequence and applies the head."""
        from data.pooling import POOLED_IDS
        from modelling.layers.pooling import pool_sequences
        from modelling.objectives.pooled import PooledObjective

        assert isinstance(self.objective, PooledObjective)
        count = self.objective.sequences_per_sample
        vectors = pool_sequences(features, token_inputs[POOLED_IDS], count, self.layout)
        stats = self.classifier(vectors) if self._has_head else vectors
        return self.objective.loss_stats(stats, token_inputs, self.layout, self.groups)


def as_lm_head(head: HeadLoss) -> LMHeadLoss:
    """Returns the output layer itself, which is that of a language model."""
    assert isinstance(head, LMHeadLoss), "a classifier generates nothing"
    return head


def make_output_layer(
    norm: Module | None,
    norm_name: str,
    std: float,
    *,
    dropout: Dropout = NO_DROPOUT,
    expert_usage: ExpertUsage | None = None,
    classifier: Callable[[], Module] | None = None,
    **lm_head: Any,
) -> HeadLoss:
    """Builds the output layer with the head that the run's objective needs.

    Args:
        norm, norm_name, dropout, expert_usage: see `HeadLoss`.
        std: of the head's initial weights.
        classifier: builds the head of a classifier; None: decoders' `score`, without bias.
        lm_head: further arguments of `LMHeadLoss`.
    """
    config = current_run_config()
    head = config.training.head
    if head == "lm":
        return LMHeadLoss(
            norm, norm_name, std, dropout=dropout, expert_usage=expert_usage, **lm_head
        )
    module = None
    if head == "classifier":
        size = config.model.hidden_size
        score = partial(ReplicatedLinear, size, config.num_labels, std, bias=False, hf_name="score")
        module = (classifier or score)()
    return PooledHeadLoss(norm, norm_name, module, dropout, expert_usage)
