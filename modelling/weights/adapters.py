"""The rows of adapters, beside each linear map that has one, under PEFT's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from config.adapter import ALL_LINEAR, Adapter
from config.errors import ConfigError
from files.shown import shown_name
from modelling.weights.row import LowRank, Weight, WeightRow, is_linear, is_trained
from modelling.weights.table import WeightTable

A, B, M = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""What PEFT's names end with, after the module's."""


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
    adapted = replace(table, layers=layers, fused={**table.fused, **modules.fused})
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


def module_of(weight: str) -> str:
    """The module that has a weight or a bias."""
    return weight.rpartition(".")[0]


def modules_of(table: WeightTable) -> tuple[list[str], list[str]]:
    """The modules that have adapters, and all others, by their names in files."""
    adapted = dict.fromkeys(adapter.module for row in table.rows for adapter in row.adapters)
    every = dict.fromkeys(map(_module_in_files(table), table.base.weights))
    return list(adapted), [name for name in every if name not in adapted]


def saved_modules(table: WeightTable) -> list[str]:
    """The modules of the weights that are trained whole, beside adapters, likewise."""
    trained = table.only(is_trained).base.weights
    return list(dict.fromkeys(map(_module_in_files(table), trained)))


def _module_in_files(table: WeightTable) -> Callable[[Weight], str]:
    """Gives a weight's module, as files name it."""
    fused = {own: name for name, owns in table.fused.items() for own in owns}
    return lambda weight: module_of(fused.get(weight.name, weight.name))


class _Modules:
    """The linear maps as files have them, of which a row may have several or a part of one.

    Attributes:
        fused: the matrices B that are parts of one in files.
    """

    def __init__(self, table: WeightTable, adapter: Adapter, targets: str) -> None:
        self._table, self._adapter, self._targets = table, adapter, targets
        self._module = _module_in_files(table)
        self.fused: dict[str, list[str]] = {}

    @property
    def _targets_all(self) -> bool:
        return (self._adapter.targets or self._targets) == ALL_LINEAR

    def adapted(self, rows: Sequence[WeightRow]) -> tuple[WeightRow, ...]:
        """The rows of a layer, and those of its adapters."""
        owners: dict[str, str] = {}
        own, more = [], list[WeightRow]()
        for row in rows:
            adapters = tuple(self._adapters(row, owners))
            own.append(replace(row, trained=self._is_saved(row), adapters=adapters))
            for adapter in adapters:
                more += self._rows(row, adapter)
        return (*own, *more)

    def _is_saved(self, row: WeightRow) -> bool:
        saved = [self._adapter.is_saved(self._module(w)) for w in row.weights]
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
        if not is_linear(row):
            return
        linear, settings = row.path.removesuffix(".weight"), self._adapter
        for number, (module, weights) in enumerate(groupby(row.weights, self._module)):
            if self._is_target(module):
                path = f"{linear}.adapters.{number}"
                yield LowRank(
                    module,
                    tuple(w.name for w in weights),
                    path,
                    settings.rank_of(module),
                    settings.scale_of(module),
                    settings.dora,
                    owners.setdefault(module, path),
                )

    def _is_target(self, module: str) -> bool:
        saved, settings = self._adapter.is_saved(module), self._adapter
        return not saved and settings.is_target(module, self._targets)

    def _rows(self, row: WeightRow, adapter: LowRank) -> Iterator[WeightRow]:
        """The rows of an adapter: A, unless another has it, B, and the norms of DoRA."""
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
        """Raise ConfigError unless there are adapters, of linear maps of layers alone."""
        linear, others = dict[str, None](), dict[str, None]()
        for row in self._table.rows:
            found = linear if is_linear(row) else others
            found |= dict.fromkeys(map(self._module, row.weights))
        asked = f"adapter.targets {shown_name(self._adapter.targets or self._targets)}"
        ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        asks = [] if self._targets_all else others.keys() - linear.keys()
        wrong = sorted(filter(self._is_target, asks))
        if wrong or not adapted.has_adapters:
            what = f"{wrong[0]}, which is" if wrong else "what is"
            raise ConfigError(f"{asked} means {what} no linear map of a layer: these are {ends}")
