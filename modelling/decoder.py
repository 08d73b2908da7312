"""Specification of a decoder-only model: training, generation and weight map derive from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from config.sections import RunConfig
from modelling.layers import Embeddings, HeadLoss, Module
from modelling.layers.module import collect_file_names, collect_mappings
from modelling.layers.run_config import use_run_config
from modelling.weights import EXPERT_GROUP, WeightMap, WeightMapping
from modelling.weights.hf_tensor_names import HfTensorNames
from modelling.weights.weight_map import EMBEDDINGS as EMBEDDINGS
from modelling.weights.weight_map import HEAD_LAYER as HEAD

if TYPE_CHECKING:
    from modelling.layers import ExpertGroup, ExpertUsage


def layer_name(index: int) -> str:
    """Returns the name that decoder layer number `index` has in the weight map."""
    return f"layer.{index}"


@dataclass(frozen=True)
class DecoderSpec:
    """The functions that create a decoder-only model's modules: embeddings, blocks and head.

    Each call builds new modules, inside `use_run_config`.

    Attributes:
        embeddings, head: the input and the output layer.
        layer_types: the type of each layer; blocks of all types have the same variables.
        block: builds a block of a type, `build(x, ctx)`.
        hf_layers: Hugging Face's path of the list of blocks.
        experts: builds a group of a layer's experts, if groups are phases of their own in training.
        expert_usage: how the usage of experts is counted; None: it is not.
    """

    embeddings: Callable[[], Embeddings]
    layer_types: Sequence[Any]
    block: Callable[[Any], Module]
    head: Callable[[], HeadLoss]
    hf_layers: str
    experts: Callable[[], ExpertGroup] | None = None
    expert_usage: ExpertUsage | None = None

    token_embedding_layer: ClassVar[str] = EMBEDDINGS
    """Weight-map name of the layer that owns the embedding weight, of which a tied head is made."""

    @property
    def layer_names(self) -> list[str]:
        """Weight-map names of all decoder layers, in order."""
        return [layer_name(i) for i in range(len(self.layer_types))]


def decoder_weight_map(config: RunConfig, spec: DecoderSpec) -> WeightMap:
    """Returns the weight map of a decoder-only model, for its phases.

    See `modelling.phases.build_decoder_only_phases`.
    """
    expert_groups = config.execution.expert_groups
    with use_run_config(config):
        embeddings, head = spec.embeddings(), spec.head()
        blocks = {
            layer_type: spec.block(layer_type) for layer_type in dict.fromkeys(spec.layer_types)
        }
    embedding_mappings, names = collect_mappings(embeddings, ""), HfTensorNames()
    if head.tied:  # some files have a copy of the embedding
        names = HfTensorNames(aliases={"lm_head.weight": embedding_mappings[0].weights[0].name})
    layers: dict[str, tuple[WeightMapping, ...]] = {}
    groups: dict[str, tuple[WeightMapping, ...]] = {}
    for i, (name, layer_type) in enumerate(zip(spec.layer_names, spec.layer_types, strict=True)):
        block, hf_path = blocks[layer_type], f"{spec.hf_layers}.{i}"
        mappings = collect_mappings(block, hf_path)
        names |= collect_file_names(block, hf_path)
        if expert_groups > 1:
            mappings, groups_of_layer = _split_off_experts(name, mappings, expert_groups)
            groups |= groups_of_layer
        layers[name] = tuple(mappings)
    phases = {
        "embeddings": (EMBEDDINGS,),
        "layer": tuple(layers),
        **({"experts": tuple(groups)} if groups else {}),
        "head": (HEAD,),
    }
    ends = {EMBEDDINGS: tuple(embedding_mappings), HEAD: tuple(collect_mappings(head, ""))}
    return WeightMap(
        {EMBEDDINGS: ends[EMBEDDINGS], **layers, **groups, HEAD: ends[HEAD]},
        phases,
        config.execution.tensor_parallel,
        names,
    )


def _split_off_experts(
    layer: str, mappings: Sequence[WeightMapping], expert_groups: int
) -> tuple[list[WeightMapping], dict[str, tuple[WeightMapping, ...]]]:
    """Splits one layer's weight mappings into those of each expert group and all the others."""
    experts = [m for m in mappings if ".experts." in m.path]
    others = [m for m in mappings if ".experts." not in m.path]
    return others, {
        f"{layer}{EXPERT_GROUP}{g}": tuple(
            m.expert_group_mapping(g, expert_groups) for m in experts
        )
        for g in range(expert_groups)
    }
