"""LoRA's weights: their rows in the table, their names in PEFT's files, and merging."""

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
    ends_with,
    is_names,
    is_within,
    matches_end,
)
from config.errors import ConfigError, nearest
from config.model import QuantConfig
from config.sections import RunConfig
from config.values import listed
from files.formatting import format_name, format_names, format_path
from modelling.quantization import fake_quantize
from modelling.weights.hf_tensor_names import FusedWeights, HfTensorNames
from modelling.weights.mapping import (
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
)
from modelling.weights.weight_map import TrainableTokens, WeightMap

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""Ends of PEFT's names, after the module's; the last one is of DoRA's norms."""
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
"""The same of an embedding: its A is (rank, tokens), its B (features, rank)."""
DELTA = "token_adapter.trainable_tokens_delta"
"""The same of rows of tokens."""


def add_adapters(weight_map: WeightMap, adapter: Adapter, targets: str) -> WeightMap:
    """The table of a model with adapters, which are trained, and `modules_to_save`; all else is
    frozen.

    Args:
        targets: those of the family, where `adapter` names none.

    Raises:
        ConfigError: no linear map is meant, or something else besides.
    """
    if not adapter.rank:
        return weight_map
    adapters = _AdapterMapper(weight_map, adapter, targets)
    layers = {
        name: adapters.with_adapter_mappings(mappings)
        for name, mappings in weight_map.layers.items()
    }
    adapted = replace(weight_map, layers=layers, hf_names=weight_map.hf_names | adapters.file_names)
    adapters.check(adapted)
    return adapted


def module_name(weight: str) -> str:
    """The module that has a weight or a bias."""
    return weight.rpartition(".")[0]


# ---- for adapter_config.json --------------------------------------------------------------------
def adapted_modules(weight_map: WeightMap) -> tuple[list[str], list[str]]:
    """The modules that have adapters, and all others, by their names in files."""
    adapters = [a for mapping in weight_map.mappings for a in mapping.adapters if not a.parameter]
    adapted = dict.fromkeys(name for a in adapters for name in (a.module, *a.tied))
    return list(adapted), [name for name in _module_names(weight_map.base) if name not in adapted]


def tied_modules(weight_map: WeightMap) -> list[list[str]]:
    """The modules that have one adapter together."""
    return [
        [a.module, *a.tied] for mapping in weight_map.mappings for a in mapping.adapters if a.tied
    ]


def saved_modules(weight_map: WeightMap) -> list[str]:
    """The modules of the weights that are trained in full beside adapters, likewise. Of a tied
    weight, all that have it."""
    return _module_names(weight_map.filter(is_trainable).base)


def adapted_parameters(weight_map: WeightMap) -> list[str]:
    """The experts' parameters that have adapters, by their names in files."""
    return list(
        dict.fromkeys(a.parameter for r in weight_map.mappings for a in r.adapters if a.parameter)
    )


def add_tied_copies(weight_map: WeightMap, tensors: Arrays) -> Arrays:
    """Tensors of files, and those of tied modules: PEFT has a tensor for each module."""
    tied = {alias: name for alias, name in weight_map.hf_names.aliases.items() if name in tensors}
    turned = weight_map.hf_names.transposed
    copies = ArraysView(tensors, renamed=tied, transform=lambda a, t: t.T if a in turned else t)
    return OverlayArrays(copies, tensors)


def has_tied_head(weight_map: WeightMap, names: Collection[str]) -> bool:
    """Decide whether some weights are of an embedding that is a decoder's head too, or of its
    adapter: PEFT's `ensure_weight_tying`, which it knows for such pairs alone."""
    own, *tied = map(module_name, weight_map.embedding_names)
    return len(tied) == 1 and own in map(module_name, names)


def unties_head(
    weight_map: WeightMap, adapted: Collection[str], is_tied: bool, folder: str
) -> bool:
    """Decide whether an adapter's model has a head apart from the embedding that its base has.

    Args:
        table: of the base model, without adapters.
        adapted: modules that the adapter has tensors of.
        is_tied: the adapter's `ensure_weight_tying`.
        folder: of the adapter, for messages.

    Raises:
        ConfigError: it parts weights that are one in this model.
    """
    tied = [module_name(name) for name in weight_map.embedding_names]
    there = [module for module in tied if module in adapted]
    if not there or len(tied) == 1:
        return False
    if len(tied) == 2:  # an embedding and a head
        return not is_tied
    missing = [module for module in tied[1:] if module not in adapted]  # the first one is not used
    if missing:
        raise ConfigError(
            f"the adapter in {format_path(folder)} trains {format_names(there)} apart from "
            f"{format_names(missing)}, which are one weight in this model: train it with "
            f"modules_to_save {','.join(tied)}"
        )
    return False


def _module_names(weight_map: WeightMap) -> list[str]:
    """The modules of a table's weights, each once."""
    of_weight = _file_modules_of(weight_map)
    return list(dict.fromkeys(name for weight in weight_map.weights for name in of_weight(weight)))


def _file_modules_of(weight_map: WeightMap) -> Callable[[Weight], list[str]]:
    """Return a function from a weight to its modules in files: its own, then those tied to it."""
    joined = weight_map.hf_names.fused.items()
    fused = {own: name for name, x in joined if x.stack is None for own in x.weights}
    tied = defaultdict[str, list[str]](list)
    for alias, name in weight_map.hf_names.aliases.items():
        tied[name].append(alias)
    return lambda weight: [
        module_name(name) for name in (fused.get(weight.name, weight.name), *tied[weight.name])
    ]


# ---- rows ---------------------------------------------------------------------------------------
class _AdapterMapper:
    """Finds the adapters of linear maps, as files have these: a row may have several, or a part of
    one. Those of experts are of the parameters that stack their maps.

    """

    def __init__(self, weight_map: WeightMap, adapter: Adapter, targets: str) -> None:
        self._weight_map, self._settings = weight_map, adapter
        self._targets = "" if adapter.target_parameters else targets
        self._requested = adapter.targets or self._targets
        self._file_modules = _file_modules_of(weight_map)
        maps = {
            w.name
            for mapping in weight_map.mappings
            if mapping.expert_matrices
            for w in mapping.weights
        }
        parameters = {
            n: x for n, x in weight_map.hf_names.fused.items() if maps.issuperset(x.weights)
        }
        ends = listed(adapter.target_parameters)
        adapted = {n: x for n, x in parameters.items() if any(ends_with(n, end) for end in ends)}
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
            self._fused[f"{module}.{A}"] = [f"{module_name(group[0])}.{A}" for group in x.groups]
            groups = tuple(tuple(f"{module_name(n)}.{B}" for n in group) for group in x.groups)
            self._stacked[f"{module}.{B}"] = FusedWeights(groups, -1, x.interleaved)

    @property
    def file_names(self) -> HfTensorNames:
        """In files some of the matrices B are parts of one, and those of experts; modules that are
        tied to an embedding have its matrices, a head their transposes."""
        fused = {name: FusedWeights.from_weights(parts) for name, parts in self._fused.items()}
        return HfTensorNames(self._aliases, fused | self._stacked, frozenset(self._transposed))

    def with_adapter_mappings(self, mappings: Sequence[WeightMapping]) -> tuple[WeightMapping, ...]:
        """The rows of a layer, and those of its adapters."""
        owners: dict[str, str] = {}
        own, more = [], list[WeightMapping]()
        for mapping in mappings:
            adapters = tuple(self._adapters(mapping, owners))
            own.append(replace(mapping, trainable=self._is_saved(mapping), adapters=adapters))
            for _, of_path in groupby(adapters, lambda adapter: adapter.path):
                more += self._adapter_mappings(mapping, list(of_path))
        return (*own, *more)

    def _is_saved(self, mapping: WeightMapping) -> bool:
        saved = [any(map(self._settings.is_saved, self._file_modules(w))) for w in mapping.weights]
        if any(saved) and not all(saved):
            names = ", ".join(w.name for w in mapping.weights)
            raise ConfigError(
                f"adapter.modules_to_save means some of {names}, which are one variable: name all "
                "of them, or none"
            )
        return all(saved)

    def _adapters(self, mapping: WeightMapping, owners: dict[str, str]) -> Iterator[LoraSpec]:
        """The adapters of a row's weights: of experts, one for each matrix in files.

        Args:
            owners: paths of adapters that have an A, by module; new ones are added.
        """
        linear, settings = mapping.path.removesuffix(".weight"), self._settings
        for weight in mapping.weights if mapping.expert_matrices else ():
            if weight.name in self._matrices:
                name, group = self._matrices[weight.name]
                of = settings.rank_of(name), settings.scale_of(name), False
                path = f"{linear}_adapter"
                yield LoraSpec(module_name(weight.name), group, path, *of, path, parameter=name)
        parts = groupby(mapping.weights, lambda weight: self._file_modules(weight)[0])
        for number, (module, weights) in enumerate(parts if can_have_adapter(mapping) else ()):
            own = list(weights)
            names = self._file_modules(own[0])
            if self._is_target(mapping, names):
                embeds = mapping.path == EMBEDDING
                path = f"{linear}.adapters" + ("" if is_vocabulary(mapping) else f".{number}")
                yield LoraSpec(
                    module,
                    tuple(w.name for w in own),
                    path,
                    settings.rank_of(*names),
                    settings.scale_of(*names),
                    settings.dora,
                    owners.setdefault(module, path),
                    embeds,
                    tuple(names[1:]) if embeds else (),
                )

    def _is_target(self, mapping: WeightMapping, names: Sequence[str]) -> bool:
        """Decide whether any of a map's names means that it has an adapter."""
        if self._requested == ALL_LINEAR and not is_linear(mapping):
            return False
        return any(self._settings.is_adapted(name, self._targets) for name in names)

    def _adapter_mappings(
        self, mapping: WeightMapping, adapters: Sequence[LoraSpec]
    ) -> Iterator[WeightMapping]:
        """The rows of adapters side by side: A, unless another has it, B, and DoRA's norms.

        What A has in common with inputs that are sharded, or B with outputs, is sharded like them.
        """
        first = adapters[0]
        if first.embeds:
            yield from self._embedding_adapter_mappings(mapping.weights[0], first)
            return
        shapes, a, b, m = {w.name: w.shape for w in mapping.weights}, [], [], []
        for adapter in adapters:
            features = shapes[adapter.weights[0]][1]
            std = (3 * features) ** -0.5  # from -1 / sqrt(features) to its opposite, as in PEFT
            a.append(Weight(f"{adapter.module}.{A}", (adapter.rank, features), std, uniform=True))
            for name in adapter.weights:
                outputs, module = shapes[name][0], module_name(name)
                b.append(Weight(f"{module}.{B}", (outputs, adapter.rank), 0.0))
                m.append(Weight(f"{module}.{MAGNITUDE}", (outputs,)))
        if mapping.expert_matrices:
            cut_in, cut = (
                mapping.transpose,
                replace(mapping, expert_matrices=0, adapters=(), trainable=True),
            )
            whole = replace(cut, is_sharded=mapping.expert_parallel)
        else:
            cut_in, whole = mapping.axis == 0, WeightMapping("", (), transpose=True)
            cut = replace(whole, axis=0 if cut_in else 1, shard_replicas=mapping.shard_replicas)
        of_a, of_b = (cut, whole) if cut_in else (whole, cut)
        if first.owner == first.path:
            yield replace(of_a, path=f"{first.path}.lora_A", weights=tuple(a), is_adapter=True)
        yield self._joined_mapping(of_b, f"{first.path}.lora_B", first, B, b)
        if first.dora:
            replicas = of_b.shard_replicas
            norms = WeightMapping("", (), axis=0, is_sharded=not cut_in, shard_replicas=replicas)
            yield self._joined_mapping(norms, f"{first.path}.magnitude", first, MAGNITUDE, m)

    def _joined_mapping(
        self,
        mapping: WeightMapping,
        path: str,
        adapter: LoraSpec,
        end: str,
        weights: Sequence[Weight],
    ) -> WeightMapping:
        """The row of what an adapter has for each of its weights, joined where files join them."""
        names, whole = [w.name for w in weights], f"{adapter.module}.{end}"
        if names != [whole] and not adapter.parameter:
            self._fused[whole] += names
        return replace(mapping, path=path, weights=tuple(weights), is_adapter=True)

    def _embedding_adapter_mappings(
        self, weight: Weight, adapter: LoraSpec
    ) -> Iterator[WeightMapping]:
        """A, which is 0 at first, and B, as in PEFT; a head that is tied has their transposes."""
        (tokens, features), rank = weight.shape, adapter.rank
        names = [f"{adapter.module}.{end}" for end in (EMBEDDING_A, EMBEDDING_B)]
        a, b = Weight(names[0], (rank, tokens), 0.0), Weight(names[1], (features, rank), 1.0)
        yield WeightMapping(f"{adapter.path}.lora_A", (a,), transpose=True, axis=0, is_adapter=True)
        yield WeightMapping(f"{adapter.path}.lora_B", (b,), transpose=True, is_adapter=True)
        for module in adapter.tied:
            is_head = module == module_name(HEAD)
            ends = (B, A) if is_head else (EMBEDDING_A, EMBEDDING_B)
            copies = [f"{module}.{end}" for end in ends]
            self._aliases |= dict(zip(copies, names, strict=True))
            self._transposed += copies if is_head else []

    # ---- what settings may say ------------------------------------------------------------------
    def check(self, adapted: WeightMap) -> None:
        """Check that there are adapters, of what can have one alone, and that every name in the
        settings means a module.

        Raises:
            ConfigError: a name means none, or something else.
        """
        settings, experts = self._settings, self._parameters
        _check_each("target_parameters", listed(settings.target_parameters), experts, ends_with)
        able, others = dict[str, None](), dict[str, None]()
        for mapping in self._weight_map.mappings:
            for names in map(self._file_modules, mapping.weights):
                if can_have_adapter(mapping):
                    able |= dict.fromkeys(names)
                elif self._is_target(mapping, names):
                    others[names[0]] = None
        wrong = sorted(others.keys() - able.keys())
        if wrong or not adapted.has_adapters:
            what = f"{wrong[0]}, which is" if wrong else "what is"
            more = f"; adapter.target_parameters means experts: {experts[0]}" if experts else ""
            raise ConfigError(
                f"adapter.targets {format_name(self._requested)} means {what} no linear map and no "
                f"embedding: these are {', '.join(_last_parts(able))}{more}"
            )
        self._check_layers_alone(adapted)
        if is_names(self._requested) and self._requested != ALL_LINEAR:
            _check_each("targets", listed(self._requested), able, ends_with)
        saved, every = listed(settings.modules_to_save), _module_names(self._weight_map)
        _check_each("modules_to_save", saved, every, is_within)
        named = [*adapted_modules(adapted)[0], *adapted_parameters(adapted)]
        for field in PATTERNS:
            _check_each(field, settings.patterns(field), named, matches_end)

    def _check_layers_alone(self, adapted: WeightMap) -> None:
        """Raise ConfigError for an adapter of experts, or at an end of the model, with settings
        that are of layers alone. PEFT drops nothing out at an embedding."""
        drops, dora = self._settings.dropout > 0, self._settings.dora
        others = [("target_parameters", "experts", drops)] if self._has_experts else []
        for mapping in filter(is_vocabulary, adapted.mappings):
            for adapter in mapping.adapters:
                is_head = mapping.path == HEAD or module_name(HEAD) in adapter.tied
                others.append(("targets", adapter.module, is_head and drops))
        for field, meant, drops in others:
            for name, given in (("dropout", drops), ("dora", dora)):
                if given:
                    raise ConfigError(
                        f"adapter.{name} is for linear maps of layers, but adapter.{field} means "
                        f"{meant}, too: leave one of the two out"
                    )


def _check_each(
    field: str,
    names: Iterable[str],
    modules: Iterable[str],
    means: Callable[[str, str], bool],
) -> None:
    """Raise ConfigError for the first name that means none of the modules.

    Args:
        means: of a module and a name.
    """
    modules = list(modules)
    for name in names:
        if not any(means(module, name) for module in modules):
            close = nearest(name, _last_parts(modules))
            raise ConfigError(f"adapter.{field}: {format_name(name, 40)} means no module{close}")


def _last_parts(modules: Iterable[str]) -> list[str]:
    """The last parts of names, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))


def peft_module_name(parameter: str, adapted: Iterable[str]) -> str:
    """The module whose name begins those of a parameter's matrices in files. PEFT wraps a module
    once for each of its parameters, the last one outermost.

    Args:
        adapted: all parameters with adapters, in their modules' order.
    """
    module = module_name(parameter)
    siblings = [name for name in adapted if module_name(name) == module]
    return module + ".base_layer" * (len(siblings) - 1 - siblings.index(parameter))


# ---- rows of tokens -----------------------------------------------------------------------------
def add_trainable_tokens(weight_map: WeightMap, config: RunConfig) -> WeightMap:
    """The table with rows for `adapter.trainable_tokens`, which are trained beside a frozen
    embedding, and a head that is not tied to it.

    Raises:
        ConfigError: the weight is trained in full as well, or has an adapter; or a weight with an
            adapter has new rows, whatever their training.
    """
    tokens = config.trained_tokens
    _check_new_rows(weight_map, config)
    if not tokens and config.adapter.trainable_tokens is not None:
        raise ConfigError(
            "adapter.trainable_tokens is new, but no rows are: give --model.add_tokens, or numbers"
        )
    if not tokens:
        return weight_map
    if (
        any(mapping.path == HEAD for mapping in weight_map.mappings)
        and len(weight_map.embedding_names) > 1
    ):
        raise ConfigError(
            "adapter.trainable_tokens is for decoders, and for a T5 whose head is its embedding: "
            "PEFT would tie this head to it; give --adapter.modules_to_save shared lm_head"
        )
    paths = {EMBEDDING, *([HEAD] if config.adapter.trainable_tokens_head else [])}
    layers, own = dict(weight_map.layers), dict(weight_map.trainable_tokens)
    for layer, mapping in [
        (n, mapping)
        for n, mappings in layers.items()
        for mapping in mappings
        if mapping.path in paths
    ]:
        (weight,) = mapping.weights
        if mapping.trainable or mapping.adapters:
            other = "all of which adapter.modules_to_save trains"
            other = "which has an adapter" if mapping.adapters else other
            raise ConfigError(
                f"adapter.trainable_tokens trains some rows of {weight.name}, {other}: leave one "
                "of the two out"
            )
        delta = Weight(f"{module_name(weight.name)}.{DELTA}", (len(tokens), weight.shape[1]))
        path = mapping.path.replace(".weight", ".rows.delta")
        layers[layer] = (*layers[layer], WeightMapping(path, (delta,), is_adapter=True))
        own[weight.name] = TrainableTokens(delta.name, tokens)
    return replace(weight_map, layers=layers, trainable_tokens=own)


def _check_new_rows(weight_map: WeightMap, config: RunConfig) -> None:
    """Raise ConfigError for an adapter of a weight with new rows: PEFT's base has no such rows."""
    if config.model.new_rows is None:
        return
    for module in (
        a.module
        for mapping in weight_map.mappings
        if is_vocabulary(mapping)
        for a in mapping.adapters
    ):
        raise ConfigError(
            f"adapter.targets means {module}, which has rows for new tokens: give "
            f"--adapter.modules_to_save {module} in its place"
        )


def has_trainable_tokens(weight_map: WeightMap, name: str, rows: Iterable[int]) -> bool:
    """Decide whether all of some rows of a weight are trained apart from it."""
    return name in weight_map.trainable_tokens and {*rows} <= {
        *weight_map.trainable_tokens[name].rows
    }


# ---- values -------------------------------------------------------------------------------------
def merge_adapters(
    weight_map: WeightMap, weights: Arrays, dtype: np.dtype, quant: QuantConfig | None = None
) -> Arrays:
    """The weights of the base model, each merged when it is asked for.

    Args:
        weights: of the model with adapters.
        dtype: of the result.
        few_bits: merge into what is left of weights that are held so; None: into the weights.
    """
    adapters, base = dict(_adapted_weights(weight_map)), weights
    names = dict.fromkeys(w.name for w in weight_map.base.weights)
    if quant is not None:
        quantized = [w.name for w in weight_map.filter(is_quantizable).weights]
        left = ArraysView(weights, quantized, lambda name, weight: fake_quantize(weight, quant))
        base = OverlayArrays(left, weights)

    def merge_weight(name: str, weight: np.ndarray) -> np.ndarray:
        if name in weight_map.trainable_tokens:
            tokens, weight = weight_map.trainable_tokens[name], weight.astype(dtype)
            weight[list(tokens.rows)] = weights[tokens.delta].astype(dtype)
        elif name in adapters:
            weight = _merge_adapter(weights, name, weight, adapters[name])
        return weight.astype(dtype, copy=False)

    return ArraysView(base, names, merge_weight, in_full=names)


def init_adapters(weight_map: WeightMap, base: Arrays, seed: int) -> Arrays:
    """The weights of new adapters, which change nothing: DoRA's norms are those of the base."""
    makers = {
        f"{module_name(name)}.{MAGNITUDE}": partial(_row_norms, base, name)
        for name, adapter in _adapted_weights(weight_map)
        if adapter.dora
    }
    makers |= {
        r.delta: partial(_initial_token_rows, base, name, r)
        for name, r in weight_map.trainable_tokens.items()
    }
    return OverlayArrays(LazyArrays(makers), weight_map.filter(is_adapter).init_weights(seed))


def _adapted_weights(weight_map: WeightMap) -> list[tuple[str, LoraSpec]]:
    """Each weight that has an adapter, and this."""
    return [
        (name, a) for mapping in weight_map.mappings for a in mapping.adapters for name in a.weights
    ]


def _merge_adapter(weights: Arrays, name: str, weight: np.ndarray, adapter: LoraSpec) -> np.ndarray:
    """W + scale * B A, float32, with DoRA's norms."""
    module = module_name(name)
    if adapter.embeds:
        b, a = (weights[f"{module}.{end}"].T for end in (EMBEDDING_A, EMBEDDING_B))
    else:
        b, a = weights[f"{module}.{B}"], weights[f"{adapter.module}.{A}"]
    total: np.ndarray = weight.astype(np.float32) + np.float32(adapter.scale) * (b @ a)
    if adapter.dora:
        total *= (weights[f"{module}.{MAGNITUDE}"] / np.linalg.norm(total, axis=1))[:, None]
    return total


def _row_norms(base: Arrays, name: str) -> np.ndarray:
    norms: np.ndarray = np.linalg.norm(base[name].astype(np.float32), axis=1)
    return norms


def _initial_token_rows(base: Arrays, name: str, tokens: TrainableTokens) -> np.ndarray:
    found: np.ndarray = base[name][list(tokens.rows)].astype(np.float32)
    return found
