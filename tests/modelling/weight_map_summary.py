"""The weight maps of all families and ways to shard them, without the variables' paths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from config.gptj import GPTJConfig
from config.sections import RunConfig
from config.t5 import T5Config
from modelling.llama.config_json import MIXTURES
from modelling.model_family import get_family
from modelling.weights import WeightMap
from tests.modelling.llama.hf import SETTINGS, hf_config, our_config

T5_SIZES = {
    "hidden_size": 16,
    "d_ff": 24,
    "layers": 3,
    "attention": {"heads": 4, "d_kv": 6},
    "embedding": {"vocab_size": 50},
}
GPTJ_SIZES = {
    "hidden_size": 32,
    "layers": 2,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "attention": {"heads": 4, "rotary_dim": 4},
    "embedding": {"vocab_size": 50},
}


def cases() -> Iterator[tuple[str, RunConfig]]:
    """Each case's name and configuration."""
    for kind in SETTINGS:
        own = our_config(hf_config(kind, vocab_size=60))
        for tp in (1, 2, 4):
            for name, fields in _layouts(kind, tp):
                yield f"{kind} tp {tp}{name}", _changed(own, tensor_parallel=tp, **fields)
    for tp in (1, 2):
        yield f"gptj tp {tp}", _built(GPTJConfig, GPTJ_SIZES, tp)
        for gated in (True, False):
            for tied in (True, False):
                sizes = T5_SIZES | {
                    "is_gated_act": gated,
                    "activation": "gelu_tanh" if gated else "relu",
                }
                sizes |= {"embedding": {"vocab_size": 50, "tied": tied}, "decoder_layers": 2}
                yield f"t5 gated {gated} tied {tied} tp {tp}", _built(T5Config, sizes, tp)


def _layouts(kind: str, tp: int) -> list[tuple[str, dict[str, Any]]]:
    layouts: list[tuple[str, dict[str, Any]]] = [("", {})]
    if kind in MIXTURES:
        settings = SETTINGS[kind]
        count = settings.get("num_experts") or settings["num_local_experts"]
        if tp > 1 and count % tp == 0:
            layouts.append((" expert parallel", {"expert_parallel": True}))
        groups = next(n for n in range(2, count + 1) if count % n == 0)
        layouts.append((" expert groups", {"expert_groups": groups}))
    return layouts


def _changed(config: RunConfig, **execution: Any) -> RunConfig:
    return replace(config, execution=replace(config.execution, **execution))


def _built(cls: Any, sizes: dict[str, Any], tp: int) -> RunConfig:
    built: RunConfig = cls.from_dict(
        {"family": cls.family, "model": sizes, "execution": {"tensor_parallel": tp}}
    )
    return built


def summary(weight_map: WeightMap) -> dict[str, Any]:
    """All that a table says but the paths of variables."""
    joined = sorted(weight_map.hf_names.fused.items())
    return {
        "layers": {name: sorted(map(_row, rows)) for name, rows in weight_map.layers.items()},
        "phases": {name: list(layers) for name, layers in weight_map.phases.items()},
        "tensor_parallel": weight_map.tensor_parallel,
        "aliases": dict(sorted(weight_map.hf_names.aliases.items())),
        "fused": {name: x.weight_names for name, x in joined if x.stack_axis is None},
        "stacked": {
            name: [x.groups, x.interleaved, x.transposed, x.in_exports]
            for name, x in joined
            if x.stack_axis is not None
        },
    }


def _row(row: Any) -> list[Any]:
    weights = [[w.name, list(w.shape), str(w.std), w.uniform] for w in row.weights]
    cut = row.is_sharded if row.axis is not None else True
    return [
        weights,
        row.transpose,
        str(row.axis),
        cut,
        row.shard_replicas,
        row.expert_matrices,
        row.expert_parallel,
    ]


def digest(config: RunConfig) -> str:
    """The digest of a configuration's table."""
    text = json.dumps(summary(get_family(config).weight_map(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
