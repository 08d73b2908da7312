"""Module paths of PopXL, so that `from popxl.ops.add import add` works.

PopXL has a module for each op; in `popxl.ops` a module holds a family of ops. Each path of PopXL
stands for the families that have what the path's module has.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

# Families -> the paths, below `popxl.ops`, that lead to them.
_PATHS = {
    "activation": "gelu geluerf relu softmax swish tanh",
    "arithmetic": "add div fmod increment_mod mul pow scaled_add sub",
    "arithmetic reduction": "max",
    "collectives.replicated": "collectives.replicated_all_gather "
    "collectives.replicated_all_reduce collectives.replicated_reduce_scatter",
    "convolution _windows": "conv",
    "dynamic": "dynamic_slice dynamic_update",
    "elementwise": "abs ceil clip cos detach exp floor identity isfinite isinf isnan log negate "
    "sign sin sqrt",
    "elementwise float8_143_152": "cast",
    "fp8_e4m3_e5m2": "fp8",
    "gathering": "gather onehot scatter topk",
    "host": "host_load host_store",
    "linalg float8_143_152": "matmul",
    "logic": "equal greater logical_and logical_not logical_or where",
    "loss": "negative_log_likelihood",
    "normalisation": "batch_norm group_norm",
    "placement": "code_copy init io_tile_copy ipu_copy print_tensor",
    "pooling": "pool",
    "random": "dropout random_seed shaped_dropout",
    "reduction": "argminmax cumsum l1 l2 lamb logsum logsumexp mean median min prod sum sumsquare",
    "remote": "remote_load remote_store",
    "scattering": "histogram scatter_reduce",
    "shape": "concat reshape split squeeze transpose",
    "slicing": "slice subsample",
    "vision": "interpolate roialign",
}


class _AliasModule(ModuleType):
    """A module under one of PopXL's paths that forwards attribute look-ups to other modules."""

    def __init__(self, name: str, families: list[str]) -> None:
        super().__init__(name, f"Stands for {', '.join(families)}.")
        self._names = families

    @property
    def _families(self) -> list[ModuleType]:
        return [importlib.import_module(name) for name in self._names]

    def __getattr__(self, name: str) -> Any:
        # `__file__` and the like are the families' own: `inspect` finds modules by them.
        for family in () if name.startswith("__") else self._families:
            if hasattr(family, name):
                return getattr(family, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({name for family in self._families for name in dir(family)})


def register_module_paths(package: str) -> None:
    """Makes PopXL's module paths importable; the name `ops.add` stays the function."""
    for names, paths in _PATHS.items():
        families = [f"{package}.{name}" for name in names.split()]
        for path in paths.split():
            sys.modules[f"{package}.{path}"] = _AliasModule(f"{package}.{path}", families)
