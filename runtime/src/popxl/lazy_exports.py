"""Names of a package that are imported when they are first used (PEP 562).

A start imports what its program needs and no more. A package lists its names under `if
TYPE_CHECKING:`, where type checkers and editors read them; `lazy_exports` reads the same lines, so
that there is one list:

    if TYPE_CHECKING:
        from popxl.ops.arithmetic import add as add
    else:
        lazy_exports(__name__)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Any


def lazy_exports(package: str) -> None:
    """Imports the names that a package lists under `if TYPE_CHECKING:` on first use.

    Also sets `__all__` and `dir`. To be called by the package itself.

    Raises:
        ImportError: the package has no source file, as where only compiled files are installed.
    """
    module = sys.modules[package]
    name = package if module.__spec__ is None else module.__spec__.name  # of `python -m NAME`
    source = module.__loader__.get_source(name)  # type: ignore[union-attr]
    if source is None:
        raise ImportError(
            f"{package} reads the names that it exports from its source, which is not there: "
            "install it with its .py files",
            name=package,
        )
    homes = dict(_read_exports(ast.parse(source), package))
    eager = {name for name, value in vars(module).items() if not isinstance(value, ModuleType)}
    public = {name for name in (*homes, *eager) if not name.startswith("_")} - _OWN_NAMES
    module.__all__ = sorted(public)  # type: ignore[attr-defined]
    module._homes = homes  # type: ignore[attr-defined]
    module.__class__ = _LazyPackage


_OWN_NAMES = {"TYPE_CHECKING", "lazy_exports", "annotations"}


def exported_names(package: str) -> list[str]:
    """Returns the public names of a lazy package."""
    names: list[str] = import_module(package).__all__
    return names


def load_all(package: str) -> None:
    """Imports every module of a package, such as all that define ops."""
    for found in walk_packages(import_module(package).__path__, f"{package}."):
        import_module(found.name)


def _read_exports(tree: ast.Module, package: str) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Yields the listed names with the module of each, and its name there; None for a module."""
    for block in tree.body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    for alias in node.names:
                        at_home: tuple[str, str | None] = (node.module, alias.name)
                        if node.module == package:
                            at_home = (f"{package}.{alias.name}", None)
                        yield alias.asname or alias.name, at_home


class _LazyPackage(ModuleType):
    """A package whose names are imported on first use."""

    _homes: dict[str, tuple[str, str | None]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home, name_there = self._homes.get(name, (f"{self.__name__}.{name}", None))
        try:
            value: Any = import_module(home)
        except ModuleNotFoundError as error:
            if error.name != home or name in self._homes:
                raise
            text = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=self) from None
        if name_there is not None:
            value = getattr(value, name_there)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds each sub-module in its package. Where a sub-module has the name
        # of what it defines, such as `popxl.ops.call`, the name is the package's for the latter.
        home, name_there = self._homes.get(name, ("", None))
        if isinstance(value, ModuleType) and value.__name__ == home and name_there is not None:
            value = getattr(value, name_there)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self._homes})
