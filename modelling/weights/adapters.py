"""The rows of adapters, beside each linear map that has one, under PEFT's names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np

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
from config.values import listed
from files.shown import shown_name
from modelling.weights.computed import Arrays, Computed
from modelling.weights.expert_adapters import A, B, ExpertParameters, module_of, parameters_of
from modelling.weights.row import (
    EMBEDDING,
    HEAD,
    LowRank,
    Weight,
    WeightRow,
    is_linear,
    is_of_vocabulary,
    is_trained,
    takes_adapter,
)
from modelling.weights.table import WeightTable

M = "lora_magnitude_vector"
"""What PEFT's names of DoRA's norms end with, after the module's."""
TOKENS_A, TOKENS_B = "lora_embedding_A", "lora_embedding_B"
"""The same of an embedding: its A is (rank, tokens), its B (features, rank)."""


def with_adapters(table: WeightTable, adapter: Adapter, targets: str) -> WeightTable:
    """The table of a model with adapters, which are trained, and `modules_to_save`; all else is
    frozen.

    Args:
        targets: those of the family, where `adapter` names none.

    Raises:
        ConfigError: no linear map is meant, or something else besides.
    """
    if not adapter.rank:
        return table
    modules = _Modules(table, adapter, targets)
    layers = {name: modules.adapted(rows) for name, rows in table.layers.items()}
    adapted = replace(
        table,
        layers=layers,
        fused={**table.fused, **modules.fused},
        stacked={**table.stacked, **modules.stacked},
        aliases={**table.aliases, **modules.aliases},
        turned=frozenset(modules.turned),
    )
    modules.check(adapted)
    return adapted


def check_all_frozen(table: WeightTable) -> None:
    """Raise ConfigError if a linear map of a layer is trained whole, which 4 bits do not allow."""
    for row in table.rows:
        if is_linear(row) and row.trained:
            raise ConfigError(
                f"{row.weights[0].name} is trained whole, but model.quantisation holds it in few "
                "bits: leave one of the two out"
            )


def modules_of(table: WeightTable) -> tuple[list[str], list[str]]:
    """The modules that have adapters, and all others, by their names in files."""
    adapted = dict.fromkeys(
        name
        for row in table.rows
        for adapter in row.adapters
        for name in (adapter.module, *adapter.tied)
        if not adapter.parameter
    )
    return list(adapted), [name for name in _modules(table.base) if name not in adapted]


def tied_modules(table: WeightTable) -> list[list[str]]:
    """The modules that have one adapter together."""
    adapters = [adapter for row in table.rows for adapter in row.adapters if adapter.tied]
    return [[adapter.module, *adapter.tied] for adapter in adapters]


def saved_modules(table: WeightTable) -> list[str]:
    """The modules of the weights that are trained in full beside adapters, likewise. Of a tied
    weight, all that have it."""
    return _modules(table.only(is_trained).base)


def with_tied(table: WeightTable, tensors: Arrays) -> Arrays:
    """Tensors of files, and those of tied modules: PEFT has a tensor for each module."""
    tied = {alias: name for alias, name in table.aliases.items() if name in tensors}
    copies = {a: partial(_copy, tensors, name, a in table.turned) for a, name in tied.items()}
    return Computed({n: partial(tensors.__getitem__, n) for n in tensors} | copies)


def _copy(tensors: Arrays, name: str, turned: bool) -> np.ndarray:
    return tensors[name].T if turned else tensors[name]


def _modules(table: WeightTable) -> list[str]:
    """The modules of a table's weights, each once."""
    of_weight = _modules_in_files(table)
    return list(dict.fromkeys(name for weight in table.weights for name in of_weight(weight)))


def _modules_in_files(table: WeightTable) -> Callable[[Weight], list[str]]:
    """Return a function from a weight to its modules in files: its own, then those tied to it."""
    fused = {own: name for name, owns in table.fused.items() for own in owns}
    tied = defaultdict[str, list[str]](list)
    for alias, name in table.aliases.items():
        tied[name].append(alias)
    return lambda weight: [
        module_of(name) for name in (fused.get(weight.name, weight.name), *tied[weight.name])
    ]


class _Modules:
    """The linear maps as files have them, of which a row may have several or a part of one.

    Attributes:
        fused: the matrices B that are parts of one in files, and A of experts.
        stacked: the matrices B of experts.
        aliases: other names of the matrices of an embedding, of modules that are tied to it.
        turned: those that are of a head, the transposes.
    """

    def __init__(self, table: WeightTable, adapter: Adapter, targets: str) -> None:
        self._table, self._adapter = table, adapter
        self._targets = "" if adapter.target_parameters else targets
        self._asked = adapter.targets or self._targets
        self._modules = _modules_in_files(table)
        self._experts = ExpertParameters(table, adapter)
        fused, self.stacked = self._experts.in_files()
        self.fused = dict(fused)
        self.aliases: dict[str, str] = {}
        self.turned: list[str] = []

    def _module(self, weight: Weight) -> str:
        return self._modules(weight)[0]

    def adapted(self, rows: Sequence[WeightRow]) -> tuple[WeightRow, ...]:
        """The rows of a layer, and those of its adapters."""
        owners: dict[str, str] = {}
        own, more = [], list[WeightRow]()
        for row in rows:
            found = self._experts.adapters(row) if row.experts else self._adapters(row, owners)
            adapters = tuple(found)
            own.append(replace(row, trained=self._is_saved(row), adapters=adapters))
            if row.experts:
                more += self._experts.rows(row, adapters)
                continue
            for adapter in adapters:
                more += self._rows(row, adapter)
        return (*own, *more)

    def _is_saved(self, row: WeightRow) -> bool:
        saved = [any(map(self._adapter.is_saved, self._modules(w))) for w in row.weights]
        if any(saved) and not all(saved):
            names = ", ".join(w.name for w in row.weights)
            raise ConfigError(
                f"adapter.modules_to_save means some of {names}, which are one variable: name all "
                "of them, or none"
            )
        return all(saved)

    def _adapters(self, row: WeightRow, owners: dict[str, str]) -> Iterator[LowRank]:
        """The adapters of a row's weights.

        Args:
            owners: paths of adapters that have an A, by module; new ones are added.
        """
        if not takes_adapter(row):
            return
        linear, settings = row.path.removesuffix(".weight"), self._adapter
        for number, (module, weights) in enumerate(groupby(row.weights, self._module)):
            own = list(weights)
            names = self._modules(own[0])
            if self._is_target(row, names):
                path = f"{linear}.adapters.{number}"
                yield LowRank(
                    module,
                    tuple(w.name for w in own),
                    path,
                    settings.rank_of(*names),
                    settings.scale_of(*names),
                    settings.dora,
                    owners.setdefault(module, path),
                    row.path == EMBEDDING,
                    tuple(names[1:]) if row.path == EMBEDDING else (),
                )

    def _is_target(self, row: WeightRow, names: Sequence[str]) -> bool:
        """Decide whether any of a map's names means that it has an adapter."""
        if self._asked == ALL_LINEAR and not is_linear(row):
            return False
        return any(self._adapter.is_adapted(name, self._targets) for name in names)

    def _rows(self, row: WeightRow, adapter: LowRank) -> Iterator[WeightRow]:
        """The rows of an adapter: A, unless another has it, B, and the norms of DoRA."""
        if adapter.embeds:
            yield from self._rows_of_embedding(row.weights[0], adapter)
            return
        weights = [w for w in row.weights if w.name in adapter.weights]
        features = weights[0].shape[1]
        cut_in = row.axis == 0
        if adapter.owner == adapter.path:
            std = (3 * features) ** -0.5  # from -1 / sqrt(features) to its opposite, as in PEFT
            a = Weight(f"{adapter.module}.{A}", (adapter.rank, features), std, uniform=True)
            axis = 0 if cut_in else None
            yield WeightRow(f"{adapter.path}.A", (a,), transpose=True, axis=axis, of_adapter=True)
        axis, holders = (None, 1) if cut_in else (1, row.holders)
        b = self._parts(adapter, B, weights, lambda w: (w.shape[0], adapter.rank), 0.0)
        yield WeightRow(f"{adapter.path}.B", b, True, axis, holders=holders, of_adapter=True)
        if adapter.dora:
            m = self._parts(adapter, M, weights, lambda w: w.shape[:1])
            cut = not cut_in
            yield WeightRow(f"{adapter.path}.m", m, False, 0, cut, holders, of_adapter=True)

    def _rows_of_embedding(self, weight: Weight, adapter: LowRank) -> Iterator[WeightRow]:
        """A, which is 0 at first, and B, as in PEFT; a head that is tied has their transposes."""
        (tokens, features), rank = weight.shape, adapter.rank
        names = [f"{adapter.module}.{end}" for end in (TOKENS_A, TOKENS_B)]
        a, b = Weight(names[0], (rank, tokens), 0.0), Weight(names[1], (features, rank), 1.0)
        yield WeightRow(f"{adapter.path}.A", (a,), transpose=True, axis=0, of_adapter=True)
        yield WeightRow(f"{adapter.path}.B", (b,), transpose=True, of_adapter=True)
        for module in adapter.tied:
            is_head = module == module_of(HEAD)
            ends = (B, A) if is_head else (TOKENS_A, TOKENS_B)
            copies = [f"{module}.{end}" for end in ends]
            self.aliases |= dict(zip(copies, names, strict=True))
            self.turned += copies if is_head else []

    def _parts(
        self,
        adapter: LowRank,
        end: str,
        weights: Sequence[Weight],
        shape: Callable[[Weight], tuple[int, ...]],
        std: float | None = None,
    ) -> tuple[Weight, ...]:
        """What an adapter has of a name for each of its weights, joined where files join them."""
        names = [f"{module_of(w.name)}.{end}" for w in weights]
        whole = f"{adapter.module}.{end}"
        if names != [whole]:
            self.fused.setdefault(whole, []).extend(names)
        return tuple(Weight(n, shape(w), std) for n, w in zip(names, weights, strict=True))

    def check(self, adapted: WeightTable) -> None:
        """Check that there are adapters, of what can have one alone, and that every name in the
        settings means a module.

        Raises:
            ConfigError: a name means none, or something else.
        """
        parameters = listed(self._adapter.target_parameters)
        _check_each("target_parameters", parameters, self._experts.names, ends_with)
        able, others, experts = dict[str, None](), dict[str, None](), self._experts.names
        for row in self._table.rows:
            for names in map(self._modules, row.weights):
                if takes_adapter(row):
                    able |= dict.fromkeys(names)
                elif self._is_target(row, names):
                    others[names[0]] = None
        wrong = sorted(others.keys() - able.keys())
        if wrong or not adapted.has_adapters:
            what = f"{wrong[0]}, which is" if wrong else "what is"
            more = f"; adapter.target_parameters means experts: {experts[0]}" if experts else ""
            raise ConfigError(
                f"adapter.targets {shown_name(self._asked)} means {what} no linear map and no "
                f"embedding: these are {', '.join(_ends_of(able))}{more}"
            )
        self._experts.check()
        self._check_ends(adapted)
        self._check_names(self._asked, able, [*modules_of(adapted)[0], *parameters_of(adapted)])

    def _check_ends(self, adapted: WeightTable) -> None:
        """Raise ConfigError for an adapter at an end of the model with settings that are of layers
        alone. PEFT drops nothing out at an embedding."""
        ends = {a: r.path for r in adapted.rows if is_of_vocabulary(r) for a in r.adapters}
        for adapter, path in ends.items():
            is_head = path == HEAD or module_of(HEAD) in adapter.tied
            settings = {"dropout": is_head and self._adapter.dropout > 0, "dora": adapter.dora}
            for name in [name for name, given in settings.items() if given]:
                raise ConfigError(
                    f"adapter.{name} is for linear maps of layers, but adapter.targets means "
                    f"{adapter.module}, too: leave one of the two out"
                )

    def _check_names(self, asked: str, linear: Iterable[str], adapted: Iterable[str]) -> None:
        """Raise ConfigError for a name in a list, or an expression, that means no module.

        Args:
            asked: the targets.
            linear: modules that can have adapters.
            adapted: those that have one.
        """
        settings = self._adapter
        if is_names(asked) and asked != ALL_LINEAR:
            _check_each("targets", listed(asked), linear, ends_with)
        saved, every = listed(settings.modules_to_save), _modules(self._table)
        _check_each("modules_to_save", saved, every, is_within)
        for field in PATTERNS:
            _check_each(field, settings.patterns(field), adapted, matches_end)


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
            raise ConfigError(f"adapter.{field}: {shown_name(name, 40)} means no module{close}")


def _ends_of(modules: Iterable[str]) -> list[str]:
    """The last parts of names, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
