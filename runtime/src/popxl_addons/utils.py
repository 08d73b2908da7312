"""Utilities that programs import from popxl_addons."""

from __future__ import annotations

import collections
import logging
import re
import time
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np

from popxl import Tensor, Variable, dtypes, ops
from popxl.utils import to_numpy

logger = logging.getLogger(__name__)

_KT = TypeVar("_KT")
_VT = TypeVar("_VT")
E = TypeVar("E")

_SUBGRAPH = re.compile(r"_subgraph(\(\d+\))?$")


def cast_if_needed(t: Tensor, dtype: dtypes.dtype) -> Tensor:
    """Cast a tensor; return the tensor itself if it has that type."""
    # A cast to the same type would be compiled by itself, and would copy.
    return t if t.dtype == dtype else ops.cast(t, dtype)


class OrderedDict(collections.OrderedDict[_KT, _VT], Generic[_KT, _VT]):
    """A dict whose values can also be accessed by position."""

    def idx(self, idx: int) -> _VT:
        """Return the value at position `idx`; negative positions count from the end."""
        return list(self.values())[idx]


class WeightsDict(MutableMapping[Variable, np.ndarray]):
    """A dict of variables and their host data, checked and converted on insertion.

    Arrays take the variable's dtype. Merge two with `weights.update(others)`.

    Raises:
        TypeError: a key is not a variable.
        ValueError: an array does not have the variable's `shape_on_host`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.dict: dict[Variable, np.ndarray] = {}
        self.update(dict(*args, **kwargs))

    def __getitem__(self, key: Variable) -> np.ndarray:
        return self.dict[key]

    def __setitem__(self, key: Variable, value: np.ndarray) -> None:
        if not isinstance(key, Variable):
            raise TypeError(f"keys of a WeightsDict must be variables, but {key!r} is not")
        data = to_numpy(value, key.dtype, copy=False)
        if data.shape != key.shape_on_host:
            raise ValueError(
                f"data for variable {key.id!r} must have shape {key.shape_on_host}, but has "
                f"{data.shape}"
            )
        self.dict[key] = data

    def __delitem__(self, key: Variable) -> None:
        del self.dict[key]

    def __len__(self) -> int:
        return len(self.dict)

    def __iter__(self) -> Iterator[Variable]:
        return iter(self.dict)


@contextmanager
def null_context() -> Iterator[None]:
    """Return a context manager without effect."""
    yield


@contextmanager
def timer(title: str | None = None, log_to_wandb: bool = True) -> Iterator[None]:
    """Context manager that logs the start and the duration of its body, in minutes.

    An active run of W&B gets the time in its summary: `timer("Load weights")` as
    `load_weights_mins`.
    """
    name = title or "timer"
    logger.info("%s ...", name)
    start = time.perf_counter()
    yield
    minutes = (time.perf_counter() - start) / 60
    logger.info("%s duration: %.2f mins", name, minutes)
    if log_to_wandb:
        run = active_wandb_run()
        if run is not None:
            run.summary[f"{name.lower().replace(' ', '_')}_mins"] = minutes


def active_wandb_run() -> Any:
    """Return the active W&B run or None; never imports wandb."""
    import sys

    wandb = sys.modules.get("wandb")
    return getattr(wandb, "run", None)


def suffix_graph_name(name: str, suffix: str) -> str:
    """Return the name of a graph made from another: `f_subgraph(0)` with `grad` gives `f_grad`."""
    return f"{_SUBGRAPH.sub('', name)}_{suffix}"


def overrides(cls: type, base_cls: type, method: str) -> bool:
    """True if the class `cls` overrides a method of its base class `base_cls`."""
    return getattr(cls, method) is not getattr(base_cls, method)


def duplicate_items(iterable: Iterable[E]) -> list[E]:
    """Return items that occur more than once, each once, in order of first occurrence."""
    counts = collections.Counter(iterable)
    return [item for item, n in counts.items() if n > 1]
