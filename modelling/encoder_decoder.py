"""Specification of an encoder-decoder model, from which training and generation are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import popxl_addons as addons
from config.sections import RunConfig
from modelling.layers import Embeddings, HeadLoss, Module, PositionBias, as_lm_head
from modelling.layers.module import collect_file_names, collect_mappings
from modelling.layers.run_config import use_run_config
from modelling.weights import WeightMap, WeightMapping
from modelling.weights.hf_tensor_names import HfTensorNames
from modelling.weights.weight_map import EMBEDDINGS, HEAD_LAYER
from modelling.weights.weight_mapping import EMBEDDING

DECODER_EMBEDDINGS, ENCODER_HEAD = "decoder_embeddings", "encoder_head"
TOKENS = "tokens"
"""The module of embeddings that has an embedding weight, see `EncoderDecoderSpec`."""

ModuleT = TypeVar("ModuleT", bound=Module)


@dataclass(frozen=True)
class BlockStack:
    """The stack of transformer blocks of an encoder or a decoder.

    They have the same variables, except for a `PositionBias` that the first block owns, if all
    share it.

    Attributes:
        num_layers: number of blocks.
        block: builds a block of a type, `build(x, ctx)`.
        hf_layers: Hugging Face's path of the list of blocks.
        layer_types: the type of each block; empty: True for one that owns the position bias of
            all blocks, False for the others.
        hidden_size: features between the blocks; None: the model's.
    """

    num_layers: int
    block: Callable[[Any], Module]
    hf_layers: str
    layer_types: Sequence[Any] = ()
    hidden_size: int | None = None

    @property
    def block_types(self) -> Sequence[Any]:
        """Layer type of each block of the stack, in order."""
        first = int(self.first_owns_bias)
        return self.layer_types or [i < first for i in range(self.num_layers)]

    @property
    def block_types_without_bias(self) -> Sequence[Any]:
        """Layer type of each block if its position bias is an input instead of its own variable."""
        return self.layer_types or [False] * self.num_layers

    @cached_property
    def first_owns_bias(self) -> bool:
        """True if the first block owns the position bias of all blocks."""
        return self.find_position_bias() is not None

    def find_position_bias(self) -> tuple[str, PositionBias] | None:
        """Returns path and module of the position bias that the first block owns for all blocks.

        None if the blocks have no position bias, or one each.
        """
        if self.layer_types:
            return None
        shares = any(bias.is_shared for _, bias in find_modules(self.block(False), PositionBias))
        return next(find_modules(self.block(True), PositionBias)) if shares else None


@dataclass(frozen=True)
class EncoderDecoderSpec:
    """The functions that create an encoder-decoder's modules: embeddings, blocks and heads.

    Each call builds new modules, inside `use_run_config`.

    Attributes:
        embeddings: the input layer of the encoder, whose `tokens` own their weight.
        encoder, decoder: the blocks.
        head: the output layer of the decoder.
        hf_embedding_names: other names in files of the embedding weight of
            `token_embedding_layer`, besides a tied head's.
        encoder_head: the output layer of the encoder; None: it has none.
        decoder_embeddings: the input layer of the decoder, if it has variables besides the
            embedding weight; None: the encoder's.
        has_decoder_tokens: True if the decoder's embeddings have an embedding weight of their own,
            which a tied head shares.
    """

    embeddings: Callable[[], Embeddings]
    encoder: BlockStack
    decoder: BlockStack
    head: Callable[[], HeadLoss]
    hf_embedding_names: Sequence[str]
    encoder_head: Callable[[], Module] | None = None
    decoder_embeddings: Callable[[], Embeddings] | None = None
    has_decoder_tokens: bool = False

    @property
    def stacks(self) -> dict[str, BlockStack]:
        """The encoder's and the decoder's stack of blocks, by the names "encoder" and "decoder"."""
        return {"encoder": self.encoder, "decoder": self.decoder}

    @property
    def token_embedding_layer(self) -> str:
        """Weight-map name of the layer that owns the embedding weight of decoder and tied head."""
        return DECODER_EMBEDDINGS if self.has_decoder_tokens else EMBEDDINGS


def encoder_decoder_weight_map(config: RunConfig, spec: EncoderDecoderSpec) -> WeightMap:
    """Returns the weight map of an encoder-decoder, for its phases.

    See `modelling.phases.build_encoder_decoder_phases`.

    An embedding weight belongs to the embeddings, even if the head is tied to it. If the vectors of
    sequences are the output, there is an encoder alone.
    """
    layers: dict[str, tuple[WeightMapping, ...]] = {}
    phases: dict[str, tuple[str, ...]] = {}

    def add_layer(name: str, make_module: Callable[[], Module] | None) -> None:
        if make_module is not None:
            layers[name], phases[name] = tuple(collect_mappings(make_module(), "")), (name,)

    def add_stack(title: str, stack: BlockStack) -> None:
        names = tuple(layer_name(title, i) for i in range(stack.num_layers))
        blocks = {
            layer_type: stack.block(layer_type) for layer_type in dict.fromkeys(stack.block_types)
        }
        for i, (name, layer_type) in enumerate(zip(names, stack.block_types, strict=True)):
            layers[name] = tuple(collect_mappings(blocks[layer_type], f"{stack.hf_layers}.{i}"))
        # A first layer that owns a position bias is a phase of its own.
        num_first = int(stack.first_owns_bias)
        phases.update({f"first_{title}_layer": names[:num_first]} if num_first else {})
        phases[f"{title}_block"] = names[num_first:]

    with use_run_config(config):
        add_layer(EMBEDDINGS, spec.embeddings)
        add_stack("encoder", spec.encoder)
        add_layer(ENCODER_HEAD, spec.encoder_head)
        names, head_names = collect_file_names(spec.embeddings(), ""), list[str]()
        if config.training.head != "none":
            add_layer(DECODER_EMBEDDINGS, spec.decoder_embeddings)
            add_stack("decoder", spec.decoder)
            add_layer(HEAD_LAYER, spec.head)
            head = spec.head()
            head_names += [f"{as_lm_head(head).lm_head.hf_linear}.weight"] if head.tied else []
    token_embedding_layer = (
        spec.token_embedding_layer if spec.token_embedding_layer in layers else EMBEDDINGS
    )
    (embedding,) = (m.weights[0].name for m in layers[token_embedding_layer] if m.path == EMBEDDING)
    aliases = dict.fromkeys([*spec.hf_embedding_names, *head_names], embedding)
    mappings = [mapping for layer in layers.values() for mapping in layer]
    buffers = {m.weights[0].name: m.weights[0] for m in mappings if m.is_buffer}
    names |= HfTensorNames(aliases, buffers=buffers)
    return WeightMap(layers, phases, config.execution.tensor_parallel, names)


def layer_name(stack: str, index: int) -> str:
    """Returns the weight-map name of encoder or decoder layer number `index`."""
    return f"{stack}.{index}"


def find_modules(
    module: addons.Module, cls: type[ModuleT], path: str = ""
) -> Iterator[tuple[str, ModuleT]]:
    """Yields path and module of each submodule that is an instance of a class."""
    for name, child in module.named_children().items():
        if isinstance(child, cls):
            yield f"{path}{name}", child
        yield from find_modules(child, cls, f"{path}{name}.")
