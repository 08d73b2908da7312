"""Helpers for type annotations of the public API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar, get_args, get_origin

import numpy as np

ScalarType = int | float | bool
HostTensor = np.ndarray | Iterable["ScalarType | HostTensor"]
host_tensor_types = (np.ndarray, Iterable)
HostScalarTensor = ScalarType | HostTensor

T = TypeVar("T")


class _Alias:
    """Label of a type alias, so that `create_graph` can tell it from the plain type."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def NewAliasAnnotation(name: str, tp: T) -> T:  # noqa: N802 - PopXL's name
    """Returns an annotation that type checkers read as `tp` and that keeps the label `name`."""
    return Annotated[tp, _Alias(name)]  # type: ignore[return-value]


def is_alias(annotation: Any, name: str) -> bool:
    """True if `annotation` (a type or its source text) is, or contains, the alias `name`."""
    if isinstance(annotation, str):
        return name in annotation
    if get_origin(annotation) is Annotated or hasattr(annotation, "__metadata__"):
        return any(isinstance(m, _Alias) and m.name == name for m in annotation.__metadata__)
    return any(is_alias(a, name) for a in get_args(annotation))
