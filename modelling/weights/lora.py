"""LoRA's weights: their rows in the table, their names in PEFT's files, and merging."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np

from checkpoints.arrays import Arrays, LazyArrays, Overlay, View
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
from config.model import FewBits
from config.sections import RunConfig
from config.values import listed
from files.formatting import format_name, format_names, format_path
from modelling.quantisation import expanded
from modelling.weights.hf_tensor_names import FusedWeights, HfTensorNames
from modelling.weights.mapping import (
    EMBEDDING,
    HEAD,
    LowRank,
    Weight,
    WeightMapping,
    can_have_adapter,
    fits_few_bits,
    is_linear,
    is_of_adapter,
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


def with_adapters(weight_map: WeightMap, adapter: Adapter, targets: str) -> WeightMap:
    """The table of a model with adapters, which are trained, and `modules_to_save`; all else is
    frozen.

    Args:
        targets: those of the family, where `adapter` names none.

    Raises:
        ConfigError: no linear map is meant, or something else besides.
    """
    if not adapter.rank:
        return weight_map
    adapters = _Adapters(weight_map, adapter, targets)
    layers = {name: adapters.with_rows(rows) for name, rows in weight_map.layers.items()}
    adapted = replace(weight_map, layers=layers, files=weight_map.files | adapters.file_names)
    adapters.check(adapted)
    return adapted


def module_of(weight: str) -> str:
    """The module that has a weight or a bias."""
    return weight.rpartition(".")[0]


# ---- for adapter_config.json --------------------------------------------------------------------
def modules_of(weight_map: WeightMap) -> tuple[list[str], list[str]]:
    """The modules that have adapters, and all others, by their names in files."""
    adapters = [a for row in weight_map.rows for a in row.adapters if not a.parameter]
    adapted = dict.fromkeys(name for a in adapters for name in (a.module, *a.tied))
    return list(adapted), [name for name in _modules(weight_map.base) if name not in adapted]


def tied_modules(weight_map: WeightMap) -> list[list[str]]:
    """The modules that have one adapter together."""
    return [[a.module, *a.tied] for row in weight_map.rows for a in row.adapters if a.tied]


def saved_modules(weight_map: WeightMap) -> list[str]:
    """The modules of the weights that are trained in full beside adapters, likewise. Of a tied
    weight, all that have it."""
    return _modules(weight_map.only(is_trainable).base)


def parameters_of(weight_map: WeightMap) -> list[str]:
    """The experts' parameters that have adapters, by their names in files."""
    return list(
        dict.fromkeys(a.parameter for r in weight_map.rows for a in r.adapters if a.parameter)
    )


def with_tied(weight_map: WeightMap, tensors: Arrays) -> Arrays:
    """Tensors of files, and those of tied modules: PEFT has a tensor for each module."""
    tied = {alias: name for alias, name in weight_map.files.aliases.items() if name in tensors}
    turned = weight_map.files.turned
    copies = View(tensors, renamed=tied, change=lambda a, t: t.T if a in turned else t)
    return Overlay(copies, tensors)


def has_tied_head(weight_map: WeightMap, names: Collection[str]) -> bool:
    """Decide whether some weights are of an embedding that is a decoder's head too, or of its
    adapter: PEFT's `ensure_weight_tying`, which it knows for such pairs alone."""
    own, *tied = map(module_of, weight_map.embedding_names)
    return len(tied) == 1 and own in map(module_of, names)


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
    tied = [module_of(name) for name in weight_map.embedding_names]
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


def _modules(weight_map: WeightMap) -> list[str]:
    """The modules of a table's weights, each once."""
    of_weight = _modules_in_files(weight_map)
    return list(dict.fromkeys(name for weight in weight_map.weights for name in of_weight(weight)))


def _modules_in_files(weight_map: WeightMap) -> Callable[[Weight], list[str]]:
    """Return a function from a weight to its modules in files: its own, then those tied to it."""
    joined = weight_map.files.joined.items()
    fused = {own: name for name, x in joined if x.stack is None for own in x.weights}
    tied = defaultdict[str, list[str]](list)
    for alias, name in weight_map.files.aliases.items():
        tied[name].append(alias)
    return lambda weight: [
        module_of(name) for name in (fused.get(weight.name, weight.name), *tied[weight.name])
    ]


# ---- rows ---------------------------------------------------------------------------------------
class _Adapters:
    """Finds the adapters of linear maps, as files have these: a row may have several, or a part of
    one. Those of experts are of the parameters that stack their maps.

    """

    def __init__(self, weight_map: WeightMap, adapter: Adapter, targets: str) -> None:
        self._weight_map, self._settings = weight_map, adapter
        self._targets = "" if adapter.target_parameters else targets
        self._asked = adapter.targets or self._targets
        self._modules = _modules_in_files(weight_map)
        maps = {w.name for row in weight_map.rows if row.experts for w in row.weights}
        parameters = {
            n: x for n, x in weight_map.files.joined.items() if maps.issuperset(x.weights)
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
        self._turned: list[str] = []
        for name, x in adapted.items():
            module = file_module(name, adapted)
            self._fused[f"{module}.{A}"] = [f"{module_of(group[0])}.{A}" for group in x.groups]
            groups = tuple(tuple(f"{module_of(n)}.{B}" for n in group) for group in x.groups)
            self._stacked[f"{module}.{B}"] = FusedWeights(groups, -1, x.alternating)

    @property
    def file_names(self) -> HfTensorNames:
        """In files some of the matrices B are parts of one, and those of experts; modules that are
        tied to an embedding have its matrices, a head their transposes."""
        fused = {name: FusedWeights.fused(parts) for name, parts in self._fused.items()}
        return HfTensorNames(self._aliases, fused | self._stacked, frozenset(self._turned))

    def with_rows(self, rows: Sequence[WeightMapping]) -> tuple[WeightMapping, ...]:
        """The rows of a layer, and those of its adapters."""
        owners: dict[str, str] = {}
        own, more = [], list[WeightMapping]()
        for row in rows:
            adapters = tuple(self._adapters(row, owners))
            own.append(replace(row, trained=self._is_saved(row), adapters=adapters))
            for _, of_path in groupby(adapters, lambda adapter: adapter.path):
                more += self._rows(row, list(of_path))
        return (*own, *more)

    def _is_saved(self, row: WeightMapping) -> bool:
        saved = [any(map(self._settings.is_saved, self._modules(w))) for w in row.weights]
        if any(saved) and not all(saved):
            names = ", ".join(w.name for w in row.weights)
            raise ConfigError(
                f"adapter.modules_to_save means some of {names}, which are one variable: name all "
                "of them, or none"
            )
        return all(saved)

    def _adapters(self, row: WeightMapping, owners: dict[str, str]) -> Iterator[LowRank]:
        """The adapters of a row's weights: of experts, one for each matrix in files.

        Args:
            owners: paths of adapters that have an A, by module; new ones are added.
        """
        linear, settings = row.path.removesuffix(".weight"), self._settings
        for weight in row.weights if row.experts else ():
            if weight.name in self._matrices:
                name, group = self._matrices[weight.name]
                of = settings.rank_of(name), settings.scale_of(name), False
                path = f"{linear}_adapter"
                yield LowRank(module_of(weight.name), group, path, *of, path, parameter=name)
        parts = groupby(row.weights, lambda weight: self._modules(weight)[0])
        for number, (module, weights) in enumerate(parts if can_have_adapter(row) else ()):
            own = list(weights)
            names = self._modules(own[0])
            if self._is_target(row, names):
                embeds = row.path == EMBEDDING
                path = f"{linear}.adapters" + ("" if is_vocabulary(row) else f".{number}")
                yield LowRank(
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

    def _is_target(self, row: WeightMapping, names: Sequence[str]) -> bool:
        """Decide whether any of a map's names means that it has an adapter."""
        if self._asked == ALL_LINEAR and not is_linear(row):
            return False
        return any(self._settings.is_adapted(name, self._targets) for name in names)

    def _rows(self, row: WeightMapping, adapters: Sequence[LowRank]) -> Iterator[WeightMapping]:
        """The rows of adapters side by side: A, unless another has it, B, and DoRA's norms.

        What A has in common with inputs that are sharded, or B with outputs, is sharded like them.
        """
        first = adapters[0]
        if first.embeds:
            yield from self._rows_of_embedding(row.weights[0], first)
            return
        shapes, a, b, m = {w.name: w.shape for w in row.weights}, [], [], []
        for adapter in adapters:
            features = shapes[adapter.weights[0]][1]
            std = (3 * features) ** -0.5  # from -1 / sqrt(features) to its opposite, as in PEFT
            a.append(Weight(f"{adapter.module}.{A}", (adapter.rank, features), std, uniform=True))
            for name in adapter.weights:
                outputs, module = shapes[name][0], module_of(name)
                b.append(Weight(f"{module}.{B}", (outputs, adapter.rank), 0.0))
                m.append(Weight(f"{module}.{MAGNITUDE}", (outputs,)))
        if row.experts:
            cut_in, cut = row.transpose, replace(row, experts=0, adapters=(), trained=True)
            whole = replace(cut, cut=row.shared_out)
        else:
            cut_in, whole = row.axis == 0, WeightMapping("", (), transpose=True)
            cut = replace(whole, axis=0 if cut_in else 1, holders=row.holders)
        of_a, of_b = (cut, whole) if cut_in else (whole, cut)
        if first.owner == first.path:
            yield replace(of_a, path=f"{first.path}.lora_A", weights=tuple(a), of_adapter=True)
        yield self._joined(of_b, f"{first.path}.lora_B", first, B, b)
        if first.dora:
            norms = WeightMapping("", (), axis=0, cut=not cut_in, holders=of_b.holders)
            yield self._joined(norms, f"{first.path}.magnitude", first, MAGNITUDE, m)

    def _joined(
        self, row: WeightMapping, path: str, adapter: LowRank, end: str, weights: Sequence[Weight]
    ) -> WeightMapping:
        """The row of what an adapter has for each of its weights, joined where files join them."""
        names, whole = [w.name for w in weights], f"{adapter.module}.{end}"
        if names != [whole] and not adapter.parameter:
            self._fused[whole] += names
        return replace(row, path=path, weights=tuple(weights), of_adapter=True)

    def _rows_of_embedding(self, weight: Weight, adapter: LowRank) -> Iterator[WeightMapping]:
        """A, which is 0 at first, and B, as in PEFT; a head that is tied has their transposes."""
        (tokens, features), rank = weight.shape, adapter.rank
        names = [f"{adapter.module}.{end}" for end in (EMBEDDING_A, EMBEDDING_B)]
        a, b = Weight(names[0], (rank, tokens), 0.0), Weight(names[1], (features, rank), 1.0)
        yield WeightMapping(f"{adapter.path}.lora_A", (a,), transpose=True, axis=0, of_adapter=True)
        yield WeightMapping(f"{adapter.path}.lora_B", (b,), transpose=True, of_adapter=True)
        for module in adapter.tied:
            is_head = module == module_of(HEAD)
            ends = (B, A) if is_head else (EMBEDDING_A, EMBEDDING_B)
            copies = [f"{module}.{end}" for end in ends]
            self._aliases |= dict(zip(copies, names, strict=True))
            self._turned += copies if is_head else []

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
        for row in self._weight_map.rows:
            for names in map(self._modules, row.weights):
                if can_have_adapter(row):
                    able |= dict.fromkeys(names)
                elif self._is_target(row, names):
                    others[names[0]] = None
        wrong = sorted(others.keys() - able.keys())
        if wrong or not adapted.has_adapters:
            what = f"{wrong[0]}, which is" if wrong else "what is"
            more = f"; adapter.target_parameters means experts: {experts[0]}" if experts else ""
            raise ConfigError(
                f"adapter.targets {format_name(self._asked)} means {what} no linear map and no "
                f"embedding: these are {', '.join(_ends_of(able))}{more}"
            )
        self._check_layers_alone(adapted)
        if is_names(self._asked) and self._asked != ALL_LINEAR:
            _check_each("targets", listed(self._asked), able, ends_with)
        saved, every = listed(settings.modules_to_save), _modules(self._weight_map)
        _check_each("modules_to_save", saved, every, is_within)
        named = [*modules_of(adapted)[0], *parameters_of(adapted)]
        for field in PATTERNS:
            _check_each(field, settings.patterns(field), named, matches_end)

    def _check_layers_alone(self, adapted: WeightMap) -> None:
        """Raise ConfigError for an adapter of experts, or at an end of the model, with settings
        that are of layers alone. PEFT drops nothing out at an embedding."""
        drops, dora = self._settings.dropout > 0, self._settings.dora
        others = [("target_parameters", "experts", drops)] if self._has_experts else []
        for row in filter(is_vocabulary, adapted.rows):
            for adapter in row.adapters:
                is_head = row.path == HEAD or module_of(HEAD) in adapter.tied
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
            close = nearest(name, _ends_of(modules))
            raise ConfigError(f"adapter.{field}: {format_name(name, 40)} means no module{close}")


def _ends_of(modules: Iterable[str]) -> list[str]:
    """The last parts of names, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))


def file_module(parameter: str, adapted: Iterable[str]) -> str:
    """The module whose name begins those of a parameter's matrices in files. PEFT wraps a module
    once for each of its parameters, the last one outermost.

    Args:
        adapted: all parameters with adapters, in their modules' order.
    """
    module = module_of(parameter)
    siblings = [name for name in adapted if module_of(name) == module]
    return module + ".base_layer" * (len(siblings) - 1 - siblings.index(parameter))


# ---- rows of tokens -----------------------------------------------------------------------------
def with_trainable_tokens(weight_map: WeightMap, config: RunConfig) -> WeightMap:
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
    if any(row.path == HEAD for row in weight_map.rows) and len(weight_map.embedding_names) > 1:
        raise ConfigError(
            "adapter.trainable_tokens is for decoders, and for a T5 whose head is its embedding: "
            "PEFT would tie this head to it; give --adapter.modules_to_save shared lm_head"
        )
    paths = {EMBEDDING, *([HEAD] if config.adapter.trainable_tokens_head else [])}
    layers, own = dict(weight_map.layers), dict(weight_map.trainable_tokens)
    for layer, row in [(n, row) for n, rows in layers.items() for row in rows if row.path in paths]:
        (weight,) = row.weights
        if row.trained or row.adapters:
            other = "all of which adapter.modules_to_save trains"
            other = "which has an adapter" if row.adapters else other
            raise ConfigError(
                f"adapter.trainable_tokens trains some rows of {weight.name}, {other}: leave one "
                "of the two out"
            )
        delta = Weight(f"{module_of(weight.name)}.{DELTA}", (len(tokens), weight.shape[1]))
        path = row.path.replace(".weight", ".rows.delta")
        layers[layer] = (*layers[layer], WeightMapping(path, (delta,), of_adapter=True))
        own[weight.name] = TrainableTokens(delta.name, tokens)
    return replace(weight_map, layers=layers, trainable_tokens=own)


def _check_new_rows(weight_map: WeightMap, config: RunConfig) -> None:
    """Raise ConfigError for an adapter of a weight with new rows: PEFT's base has no such rows."""
    if config.model.new_rows is None:
        return
    for module in (a.module for row in weight_map.rows if is_vocabulary(row) for a in row.adapters):
        raise ConfigError(
            f"adapter.targets means {module}, which has rows for new tokens: give "
            f"--adapter.modules_to_save {module} in its place"
        )


def has_trainable_tokens(weight_map: WeightMap, name: str, rows: Iterable[int]) -> bool:
    """Decide whether all of some rows of a weight are trained apart from it."""
    return name in weight_map.trainable_tokens and {*rows} <= {
        *weight_map.trainable_tokens[name].tokens
    }


# ---- values -------------------------------------------------------------------------------------
def merge_adapters(
    weight_map: WeightMap, weights: Arrays, dtype: np.dtype, few_bits: FewBits | None = None
) -> Arrays:
    """The weights of the base model, each merged when it is asked for.

    Args:
        weights: of the model with adapters.
        dtype: of the result.
        few_bits: merge into what is left of weights that are held so; None: into the weights.
    """
    adapters, base = dict(_adapted(weight_map)), weights
    names = dict.fromkeys(w.name for w in weight_map.base.weights)
    if few_bits is not None:
        quantized = [w.name for w in weight_map.only(fits_few_bits).weights]
        left = View(weights, quantized, lambda name, weight: expanded(weight, few_bits))
        base = Overlay(left, weights)

    def merged(name: str, weight: np.ndarray) -> np.ndarray:
        if name in weight_map.trainable_tokens:
            rows, weight = weight_map.trainable_tokens[name], weight.astype(dtype)
            weight[list(rows.tokens)] = weights[rows.delta].astype(dtype)
        elif name in adapters:
            weight = _merged(weights, name, weight, adapters[name])
        return weight.astype(dtype, copy=False)

    return View(base, names, merged, in_full=names)


def init_adapters(weight_map: WeightMap, base: Arrays, seed: int) -> Arrays:
    """The weights of new adapters, which change nothing: DoRA's norms are those of the base."""
    makers = {
        f"{module_of(name)}.{MAGNITUDE}": partial(_norms_of, base, name)
        for name, adapter in _adapted(weight_map)
        if adapter.dora
    }
    makers |= {
        r.delta: partial(_rows_of, base, name, r) for name, r in weight_map.trainable_tokens.items()
    }
    return Overlay(LazyArrays(makers), weight_map.only(is_of_adapter).init_weights(seed))


def _adapted(weight_map: WeightMap) -> list[tuple[str, LowRank]]:
    """Each weight that has an adapter, and this."""
    return [(name, a) for row in weight_map.rows for a in row.adapters for name in a.weights]


def _merged(weights: Arrays, name: str, weight: np.ndarray, adapter: LowRank) -> np.ndarray:
    """W + scale * B A, float32, with DoRA's norms."""
    module = module_of(name)
    if adapter.embeds:
        b, a = (weights[f"{module}.{end}"].T for end in (EMBEDDING_A, EMBEDDING_B))
    else:
        b, a = weights[f"{module}.{B}"], weights[f"{adapter.module}.{A}"]
    total: np.ndarray = weight.astype(np.float32) + np.float32(adapter.scale) * (b @ a)
    if adapter.dora:
        total *= (weights[f"{module}.{MAGNITUDE}"] / np.linalg.norm(total, axis=1))[:, None]
    return total


def _norms_of(base: Arrays, name: str) -> np.ndarray:
    norms: np.ndarray = np.linalg.norm(base[name].astype(np.float32), axis=1)
    return norms


def _rows_of(base: Arrays, name: str, rows: TrainableTokens) -> np.ndarray:
    found: np.ndarray = base[name][list(rows.tokens)].astype(np.float32)
    return found
