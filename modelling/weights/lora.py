"""LoRA weights: mappings, names in PEFT files, initialization and merging."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np

from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays, OverlayArrays
from config.adapter import (
    ALL_LINEAR,
    PATTERNS,
    Adapter,
    ends_with_name,
    is_inside_module,
    is_name_list,
    matches_end_of_name,
)
from config.errors import ConfigError, did_you_mean
from config.model import QuantConfig
from config.sections import RunConfig
from config.values import split_names
from files.formatting import format_name, format_names, format_path
from modelling.weights.hf_tensor_names import FusedWeights, HfTensorNames
from modelling.weights.weight_map import TrainableTokens, WeightMap
from modelling.weights.weight_mapping import (
    CLASSIFIER,
    EMBEDDING,
    HEAD,
    LoraSpec,
    Weight,
    WeightMapping,
    can_have_adapter,
    is_adapter,
    is_linear,
    is_quantizable,
    is_trainable,
    is_vocabulary,
    module_name,
)

LORA_A, LORA_B, LORA_MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""Ends of PEFT's tensor names, after the module's name; `LORA_MAGNITUDE` is DoRA's."""
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
"""Ends of PEFT's names for an embedding: A is (rank, tokens), B is (features, rank)."""
TOKENS_DELTA = "token_adapter.trainable_tokens_delta"
"""End of PEFT's name for the trainable rows of tokens."""


def add_adapters(weight_map: WeightMap, adapter_config: Adapter, targets: str) -> WeightMap:
    """Add the weight mappings of LoRA adapters; freeze all else but `modules_to_save`.

    Args:
        targets: the family's default target modules, if `adapter_config` names none.

    Raises:
        ConfigError: the targets match no linear layer, or other modules as well.
    """
    if not adapter_config.rank:
        return weight_map
    adapters = _AdapterMapper(weight_map, adapter_config, targets)
    layers = {
        name: adapters.with_adapter_mappings(mappings)
        for name, mappings in weight_map.layers.items()
    }
    adapted = replace(weight_map, layers=layers, hf_names=weight_map.hf_names | adapters.hf_names)
    adapters.check_settings(adapted)
    return adapted


# ---- for adapter_config.json --------------------------------------------------------------------
def adapted_modules(weight_map: WeightMap) -> tuple[list[str], list[str]]:
    """Names in files of the modules with adapters, and of all the other modules."""
    adapters = [a for mapping in weight_map.mappings for a in mapping.adapters if not a.parameter]
    adapted = dict.fromkeys(name for a in adapters for name in (a.module, *a.tied))
    return list(adapted), [
        name for name in _module_names(weight_map.without_adapters) if name not in adapted
    ]


def tied_modules(weight_map: WeightMap) -> list[list[str]]:
    """Groups of tied modules (embedding and head); the modules of a group share one adapter."""
    return [
        [a.module, *a.tied] for mapping in weight_map.mappings for a in mapping.adapters if a.tied
    ]


def fully_trained_modules(weight_map: WeightMap) -> list[str]:
    """Names in files of the modules that are trained in full, besides the adapters.

    A tied weight counts for every module that has it.
    """
    return _module_names(weight_map.filter_mappings(is_trainable).without_adapters)


def adapted_parameters(weight_map: WeightMap) -> list[str]:
    """Names in published files of the expert parameters that have adapters."""
    return list(
        dict.fromkeys(a.parameter for r in weight_map.mappings for a in r.adapters if a.parameter)
    )


def add_tied_copies(weight_map: WeightMap, tensors: Arrays) -> Arrays:
    """Add copies of the tensors of adapters on tied modules, as PEFT stores one per module."""
    tied = {alias: name for alias, name in weight_map.hf_names.aliases.items() if name in tensors}
    transposed = weight_map.hf_names.transposed
    copies = ArraysView(tensors, renamed=tied, transform=lambda a, t: t.T if a in transposed else t)
    return OverlayArrays(copies, tensors)


def is_head_module(module: str) -> bool:
    """True for the name of a head, or of a linear layer in it."""
    return module.partition(".")[0] == module_name(HEAD)


def has_tied_head(weight_map: WeightMap, names: Collection[str]) -> bool:
    """True if the named weights belong to an embedding (or its adapter) that is tied to a head.

    It is PEFT's `ensure_weight_tying`, which supports such pairs only.
    """
    embedding, *tied = map(module_name, weight_map.embedding_names)
    return len(tied) == 1 and embedding in map(module_name, names)


def unties_head(
    weight_map: WeightMap, adapted: Collection[str], is_tied: bool, folder: str
) -> bool:
    """True if an adapter folder unties the head from the embedding of the base model.

    Args:
        weight_map: weight map of the base model, without adapters.
        adapted: modules of which the adapter has tensors.
        is_tied: the adapter's `ensure_weight_tying`.
        folder: folder of the adapter, for messages.

    Raises:
        ConfigError: it unties modules that this model cannot have untied.
    """
    tied = [module_name(name) for name in weight_map.embedding_names]
    trained = [module for module in tied if module in adapted]
    if not trained or len(tied) == 1:
        return False
    if len(tied) == 2:  # an embedding and a head
        return not is_tied
    missing = [module for module in tied[1:] if module not in adapted]  # the first has no use
    if missing:
        raise ConfigError(
            f"the adapter in {format_path(folder)} trains {format_names(trained)} apart from "
            f"{format_names(missing)}, which are one weight in this model: train it with "
            f"modules_to_save {','.join(tied)}"
        )
    return False


def _module_names(weight_map: WeightMap) -> list[str]:
    """Names in files of the modules that any of the weights belong to, without duplicates."""
    modules = _make_hf_module_lookup(weight_map)
    return list(dict.fromkeys(name for weight in weight_map.weights for name in modules(weight)))


def _make_hf_module_lookup(weight_map: WeightMap) -> Callable[[Weight], list[str]]:
    """Returns a function: weight -> name of its module in files, then names of tied modules."""
    tensors = weight_map.hf_names.fused.items()
    fused = {
        weight: name for name, x in tensors if x.stack_axis is None for weight in x.weight_names
    }
    tied = defaultdict[str, list[str]](list)
    for alias, name in weight_map.hf_names.aliases.items():
        tied[name].append(alias)
    return lambda weight: [
        module_name(name) for name in (fused.get(weight.name, weight.name), *tied[weight.name])
    ]


# ---- mappings -----------------------------------------------------------------------------------
class _AdapterMapper:
    """Creates the weight mappings of LoRA adapters for a model's weight mappings.

    An adapter belongs to a linear layer in files: a mapping can have several, or a slice of one.
    Adapters of experts belong to the parameters that stack the experts' layers.
    """

    def __init__(self, weight_map: WeightMap, adapter: Adapter, targets: str) -> None:
        self._weight_map, self._settings = weight_map, adapter
        self._targets = "" if adapter.target_parameters else targets
        self._requested = adapter.targets or self._targets
        self._file_modules = _make_hf_module_lookup(weight_map)
        expert_mappings = [m for m in weight_map.mappings if m.expert_matrices]
        num_expert_weights = {w.name for mapping in expert_mappings for w in mapping.weights}
        fused = weight_map.hf_names.fused.items()
        parameters = {n: x for n, x in fused if num_expert_weights.issuperset(x.weight_names)}
        ends = split_names(adapter.target_parameters)
        adapted = {
            n: x for n, x in parameters.items() if any(ends_with_name(n, end) for end in ends)
        }
        self._parameters, self._has_experts = list(parameters), bool(adapted)
        self._matrices = {
            group[0]: (name, group) for name, x in adapted.items() for group in x.groups
        }
        self._fused = defaultdict[str, list[str]](list)
        self._stacked: dict[str, FusedWeights] = {}
        self._aliases: dict[str, str] = {}
        self._transposed: list[str] = []
        for name, x in adapted.items():
            module = peft_module_name(name, adapted)
            self._fused[f"{module}.{LORA_A}"] = [
                f"{module_name(group[0])}.{LORA_A}" for group in x.groups
            ]
            groups = tuple(tuple(f"{module_name(n)}.{LORA_B}" for n in group) for group in x.groups)
            self._stacked[f"{module}.{LORA_B}"] = FusedWeights(groups, -1, x.interleaved)

    @property
    def hf_names(self) -> HfTensorNames:
        """Names of the adapters' tensors in PEFT files.

        Files fuse some matrices B and stack those of experts. Modules that are tied to an
        embedding have its matrices, a tied head their transposes.
        """
        fused = {name: FusedWeights.from_weights(names) for name, names in self._fused.items()}
        return HfTensorNames(self._aliases, fused | self._stacked, frozenset(self._transposed))

    def with_adapter_mappings(self, mappings: Sequence[WeightMapping]) -> tuple[WeightMapping, ...]:
        """Returns a layer's weight mappings followed by its adapters' mappings."""
        owners: dict[str, str] = {}
        base, adapter_mappings = [], list[WeightMapping]()
        for mapping in mappings:
            adapters = tuple(self._iter_adapters(mapping, owners))
            base.append(
                replace(mapping, trainable=self._is_module_to_save(mapping), adapters=adapters)
            )
            for _, group in groupby(adapters, lambda adapter: adapter.path):
                adapter_mappings += self._adapter_mappings(mapping, list(group))
        return (*base, *adapter_mappings)

    def _is_module_to_save(self, mapping: WeightMapping) -> bool:
        """True if `modules_to_save` contains the mapping's weights, or a classifier's head does."""
        if mapping.path.startswith(CLASSIFIER):
            return True
        saved = [
            any(map(self._settings.is_fully_trained, self._file_modules(w)))
            for w in mapping.weights
        ]
        if any(saved) and not all(saved):
            names = ", ".join(w.name for w in mapping.weights)
            raise ConfigError(
                f"adapter.modules_to_save matches some of {names}, which are one variable: name "
                "all of them, or none"
            )
        return all(saved)

    def _iter_adapters(self, mapping: WeightMapping, owners: dict[str, str]) -> Iterator[LoraSpec]:
        """Yield the adapters of a mapping's weights; for experts one per matrix in files.

        Args:
            owners: paths of the adapters that own an A, by module; new ones are added.
        """
        linear, settings = mapping.path.removesuffix(".weight"), self._settings
        for weight in mapping.weights if mapping.expert_matrices else ():
            if weight.name in self._matrices:
                name, group = self._matrices[weight.name]
                rank, scale = settings.lora_rank(name), settings.lora_scale(name)
                path, module = f"{linear}_adapter", module_name(weight.name)
                yield LoraSpec(module, group, path, rank, scale, False, path, parameter=name)
        modules = groupby(mapping.weights, lambda weight: self._file_modules(weight)[0])
        for number, (module, members) in enumerate(modules if can_have_adapter(mapping) else ()):
            weights = list(members)
            names = self._file_modules(weights[0])
            if self._is_target(mapping, names):
                embeds = mapping.path == EMBEDDING
                path = f"{linear}.adapters" + ("" if is_vocabulary(mapping) else f".{number}")
                yield LoraSpec(
                    module,
                    tuple(w.name for w in weights),
                    path,
                    settings.lora_rank(*names),
                    settings.lora_scale(*names),
                    settings.dora,
                    owners.setdefault(module, path),
                    embeds,
                    tuple(names[1:]) if embeds else (),
                )

    def _is_target(self, mapping: WeightMapping, names: Sequence[str]) -> bool:
        """True if the adapter's targets match any of a module's names."""
        if self._requested == ALL_LINEAR and not is_linear(mapping):
            return False
        return any(self._settings.is_adapted(name, self._targets) for name in names)

    def _adapter_mappings(
        self, mapping: WeightMapping, adapters: Sequence[LoraSpec]
    ) -> Iterator[WeightMapping]:
        """Yield mappings of adapters: lora_A unless shared, lora_B, and DoRA's magnitude.

        A is sharded like the layer's inputs, B like its outputs, if these are sharded.
        """
        first = adapters[0]
        if first.embeds:
            yield from self._embedding_adapter_mappings(mapping.weights[0], first)
            return
        shapes, a, b, m = {w.name: w.shape for w in mapping.weights}, [], [], []
        for adapter in adapters:
            features = shapes[adapter.weights[0]][1]
            std = (3 * features) ** -0.5  # uniform in ±1 / sqrt(features), as in PEFT
            a.append(
                Weight(f"{adapter.module}.{LORA_A}", (adapter.rank, features), std, uniform=True)
            )
            for name in adapter.weights:
                outputs, module = shapes[name][0], module_name(name)
                b.append(Weight(f"{module}.{LORA_B}", (outputs, adapter.rank), 0.0))
                m.append(Weight(f"{module}.{LORA_MAGNITUDE}", (outputs,)))
        if mapping.expert_matrices:
            inputs_sharded = mapping.transpose
            sharded = replace(mapping, expert_matrices=0, adapters=(), trainable=True)
            full = replace(sharded, is_sharded=mapping.expert_parallel)
        else:
            inputs_sharded = mapping.axis == 0
            full = WeightMapping("", (), transpose=True)
            axis, replicas = 0 if inputs_sharded else 1, mapping.shard_replicas
            sharded = replace(full, axis=axis, shard_replicas=replicas)
        a_mapping, b_mapping = (sharded, full) if inputs_sharded else (full, sharded)
        if first.owner == first.path:
            yield replace(a_mapping, path=f"{first.path}.lora_A", weights=tuple(a), is_adapter=True)
        yield self._fused_adapter_mapping(b_mapping, f"{first.path}.lora_B", first, LORA_B, b)
        if first.dora:
            magnitude = WeightMapping(
                "",
                (),
                axis=0,
                is_sharded=not inputs_sharded,
                shard_replicas=b_mapping.shard_replicas,
            )
            yield self._fused_adapter_mapping(
                magnitude, f"{first.path}.magnitude", first, LORA_MAGNITUDE, m
            )

    def _fused_adapter_mapping(
        self,
        mapping: WeightMapping,
        path: str,
        adapter: LoraSpec,
        suffix: str,
        weights: Sequence[Weight],
    ) -> WeightMapping:
        """Mapping of an adapter tensor of several weights, which files fuse like the weights."""
        names, fused = [w.name for w in weights], f"{adapter.module}.{suffix}"
        if names != [fused] and not adapter.parameter:
            self._fused[fused] += names
        return replace(mapping, path=path, weights=tuple(weights), is_adapter=True)

    def _embedding_adapter_mappings(
        self, weight: Weight, adapter: LoraSpec
    ) -> Iterator[WeightMapping]:
        """Yield mappings of lora_A (zeros at first) and lora_B of an embedding or tied head.

        A tied head has their transposes.
        """
        (tokens, features), rank = weight.shape, adapter.rank
        names = [f"{adapter.module}.{end}" for end in (EMBEDDING_A, EMBEDDING_B)]
        a, b = Weight(names[0], (rank, tokens), 0.0), Weight(names[1], (features, rank), 1.0)
        yield WeightMapping(f"{adapter.path}.lora_A", (a,), transpose=True, axis=0, is_adapter=True)
        yield WeightMapping(f"{adapter.path}.lora_B", (b,), transpose=True, is_adapter=True)
        for module in adapter.tied:
            is_head = is_head_module(module)
            ends = (LORA_B, LORA_A) if is_head else (EMBEDDING_A, EMBEDDING_B)
            copies = [f"{module}.{end}" for end in ends]
            self._aliases |= dict(zip(copies, names, strict=True))
            self._transposed += copies if is_head else []

    # ---- checks of the settings -----------------------------------------------------------------
    def check_settings(self, adapted: WeightMap) -> None:
        """Raise ConfigError unless the targets fit modules that can have adapters.

        They have to match at least one module, and each name in the settings has to match a module.

        Raises:
            ConfigError: a name matches no module, or one that cannot have an adapter.
        """
        settings, experts = self._settings, self._parameters
        _check_names_match(
            "target_parameters", split_names(settings.target_parameters), experts, ends_with_name
        )
        adaptable, unsupported = dict[str, None](), dict[str, None]()
        for mapping in self._weight_map.mappings:
            for names in map(self._file_modules, mapping.weights):
                if can_have_adapter(mapping):
                    adaptable |= dict.fromkeys(names)
                elif self._is_target(mapping, names):
                    unsupported[names[0]] = None
        wrong = sorted(unsupported.keys() - adaptable.keys())
        if wrong or not adapted.has_adapters:
            module = f"{wrong[0]}, which is" if wrong else "what is"
            hint = f"; adapter.target_parameters matches experts: {experts[0]}" if experts else ""
            raise ConfigError(
                f"adapter.targets {format_name(self._requested)} matches {module} no linear layer "
                f"and no embedding: these are {', '.join(_last_name_components(adaptable))}{hint}"
            )
        self._check_layer_settings(adapted)
        if is_name_list(self._requested) and self._requested != ALL_LINEAR:
            _check_names_match("targets", split_names(self._requested), adaptable, ends_with_name)
        saved, modules = split_names(settings.modules_to_save), _module_names(self._weight_map)
        _check_names_match("modules_to_save", saved, modules, is_inside_module)
        adapted_names = [*adapted_modules(adapted)[0], *adapted_parameters(adapted)]
        for field in PATTERNS:
            _check_names_match(
                field, settings.parse_pattern(field), adapted_names, matches_end_of_name
            )

    def _check_layer_settings(self, adapted: WeightMap) -> None:
        """Raise ConfigError if an adapter with dropout or DoRA is on experts, embedding or head.

        Only linear layers in blocks support these. PEFT applies no dropout at an embedding.
        """
        drops, dora = self._settings.dropout > 0, self._settings.dora
        targets = [("target_parameters", "experts", drops)] if self._has_experts else []
        for mapping in filter(is_vocabulary, adapted.mappings):
            for adapter in mapping.adapters:
                is_head = mapping.path == HEAD or any(map(is_head_module, adapter.tied))
                targets.append(("targets", adapter.module, is_head and drops))
        for field, target, has_dropout in targets:
            for name, is_set in (("dropout", has_dropout), ("dora", dora)):
                if is_set:
                    raise ConfigError(
                        f"adapter.{name} is for linear layers in blocks, but adapter.{field} "
                        f"matches {target}, too: leave one of the two out"
                    )


def _check_names_match(
    field: str,
    names: Iterable[str],
    modules: Iterable[str],
    matches: Callable[[str, str], bool],
) -> None:
    """Raise ConfigError for the first name in a config field that matches no module.

    Args:
        matches: `matches(module, name)`.
    """
    modules = list(modules)
    for name in names:
        if not any(matches(module, name) for module in modules):
            close = did_you_mean(name, _last_name_components(modules))
            raise ConfigError(f"adapter.{field}: {format_name(name, 40)} matches no module{close}")


def _last_name_components(modules: Iterable[str]) -> list[str]:
    """Last components of dotted module names (`q_proj` of `a.b.q_proj`), without duplicates."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))


def peft_module_name(parameter: str, adapted: Iterable[str]) -> str:
    """Module name that PEFT files use as the prefix of a parameter's adapter.

    PEFT wraps a module once for each of its parameters, the last one outermost.

    Args:
        adapted: all parameters with adapters, in their modules' order.
    """
    module = module_name(parameter)
    siblings = [name for name in adapted if module_name(name) == module]
    return module + ".base_layer" * (len(siblings) - 1 - siblings.index(parameter))


# ---- trainable tokens ---------------------------------------------------------------------------
def add_trainable_tokens(weight_map: WeightMap, config: RunConfig) -> WeightMap:
    """Add the weight mappings of `adapter.trainable_tokens`.

    They are trainable rows of a frozen embedding and of an untied head.

    Raises:
        ConfigError: the weight is trainable in full as well, or has an adapter; or a weight with
            an adapter has rows for new tokens.
    """
    tokens = config.trained_tokens
    _check_new_token_rows(weight_map, config)
    if not tokens and config.adapter.trainable_tokens is not None:
        raise ConfigError(
            "adapter.trainable_tokens is new, but no rows are: give --model.add_tokens, or numbers"
        )
    if not tokens:
        return weight_map
    has_head = any(mapping.path == HEAD for mapping in weight_map.mappings)
    if has_head and len(weight_map.embedding_names) > 1:
        raise ConfigError(
            "adapter.trainable_tokens is for decoders, and for a T5 whose head is its embedding: "
            "PEFT would tie this head to it; give --adapter.modules_to_save shared lm_head"
        )
    paths = {EMBEDDING, *([HEAD] if config.adapter.trainable_tokens_head else [])}
    layers, trainable_tokens = dict(weight_map.layers), dict(weight_map.trainable_tokens)
    pairs = [(name, mapping) for name, mappings in layers.items() for mapping in mappings]
    for layer, mapping in pairs:
        if mapping.path not in paths:
            continue
        (weight,) = mapping.weights
        if mapping.trainable or mapping.adapters:
            reason = "all of which adapter.modules_to_save trains"
            reason = "which has an adapter" if mapping.adapters else reason
            raise ConfigError(
                f"adapter.trainable_tokens trains some rows of {weight.name}, {reason}: leave one "
                "of the two out"
            )
        delta = Weight(f"{module_name(weight.name)}.{TOKENS_DELTA}", (len(tokens), weight.shape[1]))
        path = mapping.path.replace(".weight", ".rows.delta")
        layers[layer] = (*layers[layer], WeightMapping(path, (delta,), is_adapter=True))
        trainable_tokens[weight.name] = TrainableTokens(delta.name, tokens)
    return replace(weight_map, layers=layers, trainable_tokens=trainable_tokens)


def _check_new_token_rows(weight_map: WeightMap, config: RunConfig) -> None:
    """Raise ConfigError if a weight with new rows has an adapter; PEFT's base lacks these rows."""
    if config.model.new_rows is None:
        return
    mappings = filter(is_vocabulary, weight_map.mappings)
    for module in (adapter.module for mapping in mappings for adapter in mapping.adapters):
        raise ConfigError(
            f"adapter.targets matches {module}, which has rows for new tokens: give "
            f"--adapter.modules_to_save {module} in its place"
        )


def has_trainable_tokens(weight_map: WeightMap, name: str, token_ids: Iterable[int]) -> bool:
    """True if all of `token_ids` are trainable tokens of the named weight."""
    tokens = weight_map.trainable_tokens.get(name)
    return tokens is not None and {*token_ids} <= {*tokens.rows}


# ---- values -------------------------------------------------------------------------------------
def merge_adapters(
    weight_map: WeightMap, weights: Arrays, dtype: np.dtype, quant: QuantConfig | None = None
) -> Arrays:
    """Returns the base model's weights, with adapters merged into each when it is read.

    Args:
        weights: weights of the model with adapters.
        dtype: data type of the result.
        quant: merge into weights that are quantized and dequantized; None: into exact weights.
    """
    adapters, base = dict(_adapted_weights(weight_map)), weights
    names = dict.fromkeys(w.name for w in weight_map.without_adapters.weights)
    if quant is not None:
        from modelling.quantization import fake_quantize

        quantized = [w.name for w in weight_map.filter_mappings(is_quantizable).weights]
        dequantized = ArraysView(
            weights, quantized, lambda name, weight: fake_quantize(weight, quant)
        )
        base = OverlayArrays(dequantized, weights)

    def merge_weight(name: str, weight: np.ndarray) -> np.ndarray:
        if name in weight_map.trainable_tokens:
            tokens, weight = weight_map.trainable_tokens[name], weight.astype(dtype)
            weight[list(tokens.rows)] = weights[tokens.delta].astype(dtype)
        elif name in adapters:
            weight = _merge_adapter(weights, name, weight, adapters[name])
        return weight.astype(dtype, copy=False)

    return ArraysView(base, names, merge_weight, in_full=names)


def init_adapters(weight_map: WeightMap, base: Arrays, seed: int) -> Arrays:
    """Initial adapter weights, with which the model computes the base model's output.

    DoRA magnitudes are the norms of the base weights.
    """
    readers = {
        f"{module_name(name)}.{LORA_MAGNITUDE}": partial(_weight_row_norms, base, name)
        for name, adapter in _adapted_weights(weight_map)
        if adapter.dora
    }
    readers |= {
        tokens.delta: partial(_initial_token_rows, base, name, tokens)
        for name, tokens in weight_map.trainable_tokens.items()
    }
    return OverlayArrays(
        LazyArrays(readers), weight_map.filter_mappings(is_adapter).init_weights(seed)
    )


def _adapted_weights(weight_map: WeightMap) -> list[tuple[str, LoraSpec]]:
    """Name and adapter of each logical weight that has an adapter."""
    return [
        (name, a) for mapping in weight_map.mappings for a in mapping.adapters for name in a.weights
    ]


def _merge_adapter(weights: Arrays, name: str, weight: np.ndarray, adapter: LoraSpec) -> np.ndarray:
    """W + scale * B A, with DoRA's magnitude if present: float32 (out features, in features)."""
    module = module_name(name)
    if adapter.embeds:
        b, a = (weights[f"{module}.{end}"].T for end in (EMBEDDING_A, EMBEDDING_B))
    else:
        b, a = weights[f"{module}.{LORA_B}"], weights[f"{adapter.module}.{LORA_A}"]
    total: np.ndarray = weight.astype(np.float32) + np.float32(adapter.scale) * (b @ a)
    if adapter.dora:
        total *= (weights[f"{module}.{LORA_MAGNITUDE}"] / np.linalg.norm(total, axis=1))[:, None]
    return total


def _weight_row_norms(base: Arrays, name: str) -> np.ndarray:
    """L2 norms of the rows of a weight, float32 (out features,)."""
    norms: np.ndarray = np.linalg.norm(base[name].astype(np.float32), axis=1)
    return norms


def _initial_token_rows(base: Arrays, name: str, tokens: TrainableTokens) -> np.ndarray:
    """Initial values of trainable token rows, from the base model: float32 (tokens, hidden)."""
    rows: np.ndarray = base[name][list(tokens.rows)].astype(np.float32)
    return rows
