"""The phases of a decoder-only model, and their order in training.

The chain's first row is the embeddings' output, then come those of the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import popxl
import popxl_addons as addons
from data.preferences import texts_per_row
from modelling.layers import Axes, Embeddings, Layers, LMHeadLoss
from modelling.phases.buffers import Chain, InputBuffers, Port
from modelling.phases.expert_groups import layers_and_experts
from modelling.phases.layout import Layout, Stage
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings


def decoder_only_layout(
    settings: Settings,
    embeddings: Embeddings,
    layers: Layers,
    head: LMHeadLoss,
    experts: addons.Module | None = None,
) -> Layout:
    """Embeddings, layers, and the head.

    Inputs: `words`, int32 (micro-batch, sequence_length), those of the head's objective, and where
    samples hold several texts, `starts`, see `data.causal_lm.starts_of`.

    Layers may add up something besides, which the head takes after x (`DecoderLayer.added_up`).

    Args:
        layers: `build(x, seed=None)` returns the shape of x, (batch, length, hidden), or
            `build(x, starts, seed=None)` where samples hold several texts.
        head: it may be tied to the embedding.
        experts: a group of a layer's, where they are phases of their own, see `layers_and_experts`.
    """
    config = settings.config
    model, batch = config.model, config.execution.micro_batch_size
    words = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
    learned = head.objective.streams(words)
    packed = {"starts": words} if texts_per_row(config) > 1 else {}
    inputs = InputBuffers({"words": words} | learned | packed, settings)
    shape = Axes.of(config).shape(batch, model.sequence_length, model.hidden_size)
    hidden = popxl.TensorSpec(shape, settings.dtype)
    chain = Chain(hidden, settings, trained=settings.trains_any("embeddings"))
    first = Phase("embeddings", embeddings, inputs.ports(["words"]), [chain.end], settings)
    added_up = getattr(layers.kinds[0], "added_up", None)
    sums = None if added_up is None else Chain(added_up, settings, trained=False)
    chains = [chain] if sums is None else [chain, sums]
    stack: list[Stage] = []
    first_layer = 0
    for name, count in settings.runs("layer", len(layers.order)).items():
        part = layers.part(range(first_layer, first_layer + count))
        others = inputs.ports(packed)
        if experts is None:
            stack += _run(name, part, chains, others, settings)
        else:
            names = name, name.replace("layer", "experts", 1)
            stack += layers_and_experts(names, part, experts, chains, others, settings)
        first_layer += count
    head_inputs = {**_named(c.end for c in chains), **inputs.ports(learned)}
    last = LossPhase("head", head, head_inputs, settings, {"tokens": first} if head.tied else None)
    order = [Stage(first, range(1)), *stack, Stage(last, range(1))]
    begin = {} if sums is None else {"begin_forward": sums.begin_value}
    return Layout(inputs, order, **begin)


def _named(ports: Iterable[Port]) -> dict[str, Port]:
    """The values that layers hand on, by name: x, and what they add up."""
    return dict(zip(("x", "sum"), ports, strict=False))


def _run(
    name: str,
    layers: Layers,
    chains: Sequence[Chain],
    others: dict[str, Port],
    settings: Settings,
) -> list[Stage]:
    """Layers that are trained alike, in order: a phase for each kind."""
    count = len(layers.order)
    trained = settings.trains_any(name)
    into, out = zip(*(chain.through(count, trained) for chain in chains), strict=True)
    kinds: list[Phase] = []
    for number, module in enumerate(layers.kinds):
        kinds.append(
            Phase(
                f"{name}_{number + 1}" if number else name,
                module,
                {**_named(into), **others},
                out,
                settings,
                count,
                weights_of=kinds[0] if kinds else None,  # it has the variables of all layers
            )
        )
    return [Stage(kinds[kind], rows) for kind, rows in layers.runs()]
