"""An encoder-decoder, described once: training, generation and the weight map use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import popxl_addons as addons
from config.sections import RunConfig
from modelling.decoder import EMBEDDINGS, HEAD
from modelling.layers import Embeddings, LMHeadLoss, Module, PositionBias
from modelling.layers.module import collect_mappings
from modelling.layers.run_config import use_run_config
from modelling.weights import WeightMap, WeightMapping
from modelling.weights.hf_tensor_names import HfTensorNames

DECODER_EMBEDDINGS, ENCODER_HEAD = "decoder_embeddings", "encoder_head"
TOKENS = "tokens"
"""The part of embeddings that has the table, which belongs to the encoder's."""

ModuleT = TypeVar("ModuleT", bound=Module)


@dataclass(frozen=True)
class BlockStack:
    """The blocks of an encoder or of a decoder. They have the same variables, but for a
    `PositionBias` of the first that the others share.

    Attributes:
        layers: their number.
        block: a block, the first or another: `build(x, ctx)`.
        hf_layers: Hugging Face's path of the list of blocks.
    """

    layers: int
    block: Callable[[bool], Module]
    hf_layers: str

    def position_bias(self) -> tuple[str, PositionBias] | None:
        """The path in the first block of what it lends to the others, and the module."""
        return next(find_modules(self.block(True), PositionBias), None)


@dataclass(frozen=True)
class EncoderDecoderSpec:
    """A family's model; modules are made anew at each call, inside `use_run_config`.

    Attributes:
        embeddings: the beginning of the encoder, whose `tokens` have the table.
        encoder, decoder: the blocks.
        head: the end of the decoder.
        hf_tables: other names of the table in files, besides that of a tied head.
        encoder_head: the end of the encoder; None: there is none.
        decoder_embeddings: the beginning of the decoder, if it has variables besides the table;
            None: that of the encoder.
    """

    embeddings: Callable[[], Embeddings]
    encoder: BlockStack
    decoder: BlockStack
    head: Callable[[], LMHeadLoss]
    hf_embedding_names: Sequence[str]
    encoder_head: Callable[[], Module] | None = None
    decoder_embeddings: Callable[[], Embeddings] | None = None

    @property
    def stacks(self) -> dict[str, BlockStack]:
        """Both stacks by name."""
        return {"encoder": self.encoder, "decoder": self.decoder}


def encoder_decoder_weight_map(config: RunConfig, model: EncoderDecoderSpec) -> WeightMap:
    """Derive the weight map for the phases of `modelling.phases.build_encoder_decoder_phases`.

    The table of tokens belongs to the encoder's embeddings, also where the head is tied to it.
    """
    layers: dict[str, tuple[WeightMapping, ...]] = {}
    phases: dict[str, tuple[str, ...]] = {}

    def add(name: str, make: Callable[[], Module] | None) -> None:
        if make is not None:
            layers[name], phases[name] = tuple(collect_mappings(make(), "")), (name,)

    def add_stack(title: str, stack: BlockStack) -> None:
        names = tuple(layer_name(title, i) for i in range(stack.layers))
        first, other = (stack.block(is_first) for is_first in (True, False))
        for i, name in enumerate(names):
            layers[name] = tuple(collect_mappings(other if i else first, f"{stack.hf_layers}.{i}"))
        count = len([*find_modules(first, PositionBias)])
        phases.update({f"first_{title}_layer": names[:count]} if count else {})
        phases[f"{title}_block"] = names[count:]

    with use_run_config(config):
        add(EMBEDDINGS, model.embeddings)
        add_stack("encoder", model.encoder)
        add(ENCODER_HEAD, model.encoder_head)
        add(DECODER_EMBEDDINGS, model.decoder_embeddings)
        add_stack("decoder", model.decoder)
        add(HEAD, model.head)
        is_tied = model.head().tied
    words = layers[EMBEDDINGS][0].weights[0].name
    copies = [*model.hf_embedding_names, *(["lm_head.weight"] if is_tied else [])]
    parts = config.execution.tensor_parallel
    rows = [row for of_layer in layers.values() for row in of_layer]
    buffers = frozenset(row.weights[0].name for row in rows if row.is_buffer)
    names = HfTensorNames(dict.fromkeys(copies, words), buffers=buffers)
    return WeightMap(layers, phases, parts, names)


def layer_name(stack: str, index: int) -> str:
    """Name of a layer of a stack."""
    return f"{stack}.{index}"


def find_modules(
    module: addons.Module, kind: type[ModuleT], path: str = ""
) -> Iterator[tuple[str, ModuleT]]:
    """Yield the parts of a module that are of a class, after their paths."""
    for name, child in module.named_children().items():
        if isinstance(child, kind):
            yield f"{path}{name}", child
        yield from find_modules(child, kind, f"{path}{name}.")
