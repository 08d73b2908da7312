"""The rows of adapters of experts, whose maps PEFT adapts as parameters that stack them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from config.adapter import Adapter, ends_with
from config.errors import ConfigError
from config.values import listed
from modelling.weights.row import LowRank, Weight, WeightRow
from modelling.weights.stacked import Stacked
from modelling.weights.table import WeightTable

A, B = "lora_A.weight", "lora_B.weight"
"""What names of matrices end with, after the module's."""


def module_of(weight: str) -> str:
    """The module that has a weight or a bias."""
    return weight.rpartition(".")[0]


class ExpertParameters:
    """The parameters that stack experts' maps, and those of them that have adapters.

    Attributes:
        names: of all.
    """

    def __init__(self, table: WeightTable, adapter: Adapter) -> None:
        maps = {w.name for row in table.rows if row.experts for w in row.weights}
        stacked = {n: x for n, x in table.stacked.items() if maps.issuperset(x.weights)}
        targets = listed(adapter.target_parameters)
        self.names = list(stacked)
        self._stacked = {
            name: parts
            for name, parts in stacked.items()
            if any(ends_with(name, target) for target in targets)
        }
        self._settings = adapter
        self._place = {
            weight: (name, group)
            for name, parts in self._stacked.items()
            for group in parts.groups
            for weight in group
        }

    def check(self) -> None:
        """Raise ConfigError for settings that experts' adapters do not have, in PEFT either."""
        given = {"dropout": self._settings.dropout > 0, "dora": self._settings.dora}
        for name in [name for name, is_given in given.items() if is_given and self._stacked]:
            raise ConfigError(
                f"adapter.{name} is for linear maps of layers, but adapter.target_parameters means "
                "experts, too: leave one of the two out"
            )

    def adapters(self, row: WeightRow) -> Iterator[LowRank]:
        """The adapters of a row's experts, one for each."""
        path, settings = f"{row.path.removesuffix('.weight')}_adapter", self._settings
        for weight in row.weights:
            name, group = self._place.get(weight.name, ("", ()))
            if group and weight.name == group[0]:
                yield LowRank(
                    module_of(weight.name),
                    group,
                    path,
                    settings.rank_of(name),
                    settings.scale_of(name),
                    False,
                    path,
                    parameter=name,
                )

    def rows(self, row: WeightRow, adapters: Iterable[LowRank]) -> Iterator[WeightRow]:
        """The rows of A and of B, cut where the maps are; what they have in common is whole."""
        shapes = {w.name: w.shape for w in row.weights}
        own, a, b = list(adapters), list[Weight](), list[Weight]()
        for adapter in own:
            features = shapes[adapter.weights[0]][1]
            std = (3 * features) ** -0.5  # from -1 / sqrt(features) to its opposite, as in PEFT
            a.append(Weight(f"{adapter.module}.{A}", (adapter.rank, features), std, uniform=True))
            b += [
                Weight(f"{module_of(name)}.{B}", (shapes[name][0], adapter.rank), 0.0)
                for name in adapter.weights
            ]
        if not own:
            return
        cut = replace(row, experts=0, of_adapter=True, adapters=(), trained=True)
        whole = replace(cut, cut=row.shared_out)
        for name, weights, kind in (("A", a, row.transpose), ("B", b, not row.transpose)):
            of = cut if kind else whole
            yield replace(of, path=f"{own[0].path}.{name}", weights=tuple(weights))

    def in_files(self) -> tuple[Mapping[str, list[str]], Mapping[str, Stacked]]:
        """The matrices that files have as one, by its name: A of all experts one after the other, B
        with an element of each in turn."""
        fused, stacked = dict[str, list[str]](), dict[str, Stacked]()
        for name, parts in self._stacked.items():
            module = file_module(name, self._stacked)
            fused[f"{module}.{A}"] = [f"{module_of(group[0])}.{A}" for group in parts.groups]
            groups = tuple(tuple(f"{module_of(n)}.{B}" for n in group) for group in parts.groups)
            stacked[f"{module}.{B}"] = Stacked(groups, parts.alternating, False, True, behind=True)
        return fused, stacked


def file_module(parameter: str, adapted: Iterable[str]) -> str:
    """The module whose name begins those of a parameter's matrices in files. PEFT wraps a module
    once for each of its parameters, the last one outermost.

    Args:
        adapted: all parameters with adapters, in their modules' order.
    """
    module = module_of(parameter)
    siblings = [name for name in adapted if module_of(name) == module]
    return module + ".base_layer" * (len(siblings) - 1 - siblings.index(parameter))


def parameters_of(table: WeightTable) -> list[str]:
    """The parameters that have adapters, by their names in files."""
    return list(dict.fromkeys(a.parameter for r in table.rows for a in r.adapters if a.parameter))
