"""A decoder alone, described once: training, prefill, decode and the weight map use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from config.sections import RunConfig
from modelling.layers import Embeddings, ExpertGroup, ExpertUsage, LMHeadLoss, Module
from modelling.layers.module import collect_file_names, collect_mappings
from modelling.layers.run_config import use_run_config
from modelling.weights import EXPERT_GROUP, WeightMap, WeightMapping
from modelling.weights.hf_tensor_names import HfTensorNames
from modelling.weights.weight_map import EMBEDDINGS as EMBEDDINGS

HEAD = "head"


def layer_name(index: int) -> str:
    """Name of a layer."""
    return f"layer.{index}"


@dataclass(frozen=True)
class DecoderSpec:
    """A family's model; modules are made anew at each call, inside `use_run_config`.

    Attributes:
        embeddings, head: its beginning and end.
        layer_types: of each layer in turn; blocks of all types have the same variables.
        block: a block of a type, `build(x, ctx)`.
        hf_layers: Hugging Face's path of the list of blocks.
        experts: a group of a layer's, where they are phases of their own in training.
        usage: what is counted of experts; None: nothing.
    """

    embeddings: Callable[[], Embeddings]
    layer_types: Sequence[Any]
    block: Callable[[Any], Module]
    head: Callable[[], LMHeadLoss]
    hf_layers: str
    experts: Callable[[], ExpertGroup] | None = None
    expert_usage: ExpertUsage | None = None

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers in turn."""
        return [layer_name(i) for i in range(len(self.layer_types))]


def decoder_weight_map(config: RunConfig, decoder: DecoderSpec) -> WeightMap:
    """Derive the weight map for the phases of `modelling.phases.build_decoder_only_phases`."""
    groups = config.execution.expert_groups
    with use_run_config(config):
        embeddings, head = decoder.embeddings(), decoder.head()
        blocks = {kind: decoder.block(kind) for kind in dict.fromkeys(decoder.layer_types)}
    words, names = collect_mappings(embeddings, ""), HfTensorNames()
    if head.tied:  # some files hold a copy of the embedding
        names = HfTensorNames(aliases={"lm_head.weight": words[0].weights[0].name})
    layers: dict[str, tuple[WeightMapping, ...]] = {}
    of_experts: dict[str, tuple[WeightMapping, ...]] = {}
    for i, (name, layer_type) in enumerate(
        zip(decoder.layer_names, decoder.layer_types, strict=True)
    ):
        block, hf_path = blocks[layer_type], f"{decoder.hf_layers}.{i}"
        rows, names = collect_mappings(block, hf_path), names | collect_file_names(block, hf_path)
        if groups > 1:
            rows, held = _without_experts(name, rows, groups)
            of_experts |= held
        layers[name] = tuple(rows)
    phases = {
        "embeddings": (EMBEDDINGS,),
        "layer": tuple(layers),
        **({"experts": tuple(of_experts)} if of_experts else {}),
        "head": (HEAD,),
    }
    return WeightMap(
        {EMBEDDINGS: tuple(words), **layers, **of_experts, HEAD: tuple(collect_mappings(head, ""))},
        phases,
        config.execution.tensor_parallel,
        names,
    )


def _without_experts(
    layer: str, rows: Sequence[WeightMapping], groups: int
) -> tuple[list[WeightMapping], dict[str, tuple[WeightMapping, ...]]]:
    """The rows of a layer that are not of its experts, and those of each group of experts."""
    held = [row for row in rows if ".experts." in row.path]
    own = [row for row in rows if ".experts." not in row.path]
    numbers = range(groups)
    return own, {
        f"{layer}{EXPERT_GROUP}{g}": tuple(row.expert_slice(g, groups) for row in held)
        for g in numbers
    }
