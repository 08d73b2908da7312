"""The base of all modules: parameters are declared in `__init__` and are tensors in `build`.

A declaration is the row of the weight map (`modelling.weights.WeightMapping`): a model's table is
derived from its modules (`collect_mappings`), whose attributes have Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from typing import cast as typed

import numpy as np

import popxl
import popxl_addons as addons
from modelling.layers.axes import ActivationLayout
from modelling.layers.parallel import ParallelGroups
from modelling.layers.run_config import current_run_config
from modelling.quantisation import QUANT_DTYPES, QUANT_FIELDS, dequantize, quantized_shapes
from modelling.weights.hf_tensor_names import HfTensorNames
from modelling.weights.mapping import Weight, WeightMapping
from popxl import ReplicaGrouping, Tensor, ops


def parameter(
    *shape: int,
    std: float | None = None,
    shard: int | None = None,
    max_shards: int | None = None,
    transposed: bool = False,
) -> Tensor:
    """Declare a parameter: `self.weight = parameter(...)` in `__init__`; in `build`, `self.weight`
    is the tensor, made an input of the graph at first use.

    Args:
        shape: in full, as Hugging Face has it.
        std: standard deviation of initial values; 0: zeros; None: ones.
        shard: axis of the variable that is sharded over tensor parallelism; None: replicated.
        max_shards: number of shards; None: tensor_parallel.
        transposed: whether the variable is (in, out) where Hugging Face's weight is (out, in).
    """
    return fused_parameter([Weight("", shape, std)], shard, max_shards, transposed)


def fused_parameter(
    weights: Sequence[Weight],
    shard: int | None = None,
    max_shards: int | None = None,
    transposed: bool = False,
    **row: Any,
) -> Tensor:
    """Declare a variable that holds several of Hugging Face's weights side by side.

    Args:
        weights: named relative to the module; "": as the attribute.
        row: further fields of the `WeightMapping`.
    """
    shard_replicas = 1
    if max_shards is not None:
        shard_replicas = max(current_run_config().execution.tensor_parallel // max_shards, 1)
    return declare(
        WeightMapping("", tuple(weights), transposed, shard, shard_replicas=shard_replicas, **row)
    )


def declare(row: WeightMapping) -> Tensor:
    """Declare the variable of a row, whose path is the attribute's name from then on."""
    return typed(Tensor, _Declared(row))  # `Module.__setattr__` keeps it; `build` sees the tensor


@dataclass(frozen=True)
class _Declared:
    row: WeightMapping


class Module(addons.Module):
    """A part of a model.

    Attributes:
        config: the run that it is made for.
        hf_name: this module's name in Hugging Face's, if it is not the attribute's; "": none.
        is_shared: whether its variables are another module's, which has the rows.
        inside: the adapters that need a seed, of a whole layer; see `seed_adapters`.
    """

    hf_name: str | None = None
    is_shared = False
    dropout_adapters: tuple[Any, ...] = ()

    def __init__(self, hf_name: str | None = None) -> None:
        super().__init__()
        self.config = current_run_config()
        self.layout = ActivationLayout.from_config(self.config)
        self._rows: dict[str, WeightMapping] = {}
        self._tensors: dict[str, Tensor] = {}
        if hf_name is not None:
            self.hf_name = hf_name

    def __setattr__(self, key: str, value: Any) -> None:
        if isinstance(value, _Declared):
            named = tuple(replace(w, name=w.name or key) for w in value.row.weights)
            self._rows[key] = replace(value.row, path=key, weights=named)
        else:
            super().__setattr__(key, value)

    if not TYPE_CHECKING:  # so that mypy still finds misspelt attributes

        def __getattr__(self, key: str) -> Tensor:
            if key not in self.__dict__.get("_rows", {}):
                raise AttributeError(f"{type(self).__name__} has no attribute {key!r}")
            if key not in self._tensors:
                self._tensors[key] = self._declared(self._rows[key])
            return self._tensors[key]

    def _clear(self) -> None:
        self._tensors = {}
        super()._clear()

    @property
    def groups(self) -> ParallelGroups:
        """The replica groups of the current Ir."""
        return ParallelGroups.current(self.config.execution.tensor_parallel)

    @property
    def dtype(self) -> popxl.dtype:
        """The model's precision."""
        return popxl.dtype.as_dtype(self.config.model.precision)

    def file_names(self, hf_path: str) -> HfTensorNames:
        """Other names of this module's parameters in files.

        Args:
            hf_path: the module's path in Hugging Face's model.
        """
        return HfTensorNames()

    def move_out(self, name: str) -> Module:
        """Return a module with a part of this one, which uses it as before: its variables are then
        counted among those of the other alone."""
        lent = Module()
        setattr(lent, name, self._submodules.pop(name))
        return lent

    # ---- variables ------------------------------------------------------------------------------
    def is_quantizable(self, row: WeightMapping) -> bool:
        """Decide whether a parameter may be held in few bits."""
        return False

    def _declared(self, row: WeightMapping) -> Tensor:
        groups = self.groups
        shape = row.shape_on_replica(groups.tensor_parallel)
        sharded = row.axis is not None and row.is_sharded
        grouping = groups.shard_grouping(row.shard_replicas) if sharded else None
        quant = self.config.model.layer_quant if self.is_quantizable(row) else None
        if quant is None:
            dtype = popxl.float32 if row.is_adapter else self.dtype
            return self.variable(row.path, shape, dtype, grouping)
        shapes = quantized_shapes((shape[0], shape[1]), quant, row.input_axis)
        parts = [
            self.variable(f"{row.path}.{part}", s, d, grouping)
            for part, s, d in zip(QUANT_FIELDS, shapes, QUANT_DTYPES, strict=True)
        ]
        return dequantize(parts, quant, self.dtype, row.input_axis)

    def variable(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: popxl.dtype,
        grouping: ReplicaGrouping | None = None,
    ) -> Tensor:
        """Add an input for a variable.

        The factory's data are zeros that take no memory: initial values are random numbers that
        belong to the whole model and not to a shard of it (see modelling.weights), and a graph can
        be built, and its memory planned, for weights too large for this machine.

        Args:
            shape: on a replica.
            grouping: replicas that hold the same shard; default: all.
        """
        zeros = np.broadcast_to(np.zeros((), dtype.as_numpy()), shape)
        return self.add_variable_input(name, zeros, dtype, replica_grouping=grouping)


def collect_mappings(module: addons.Module, hf_path: str) -> list[WeightMapping]:
    """Derive the rows of the weight map from a module's parameters.

    Args:
        hf_path: the module's path in Hugging Face's model.
    """
    return [
        replace(
            row,
            path=f"{path}{row.path}",
            weights=tuple(replace(w, name=_joined(hf, w.name)) for w in row.weights),
        )
        for path, hf, part in _walk(module, "", hf_path)
        for row in part._rows.values()
    ]


def collect_file_names(module: addons.Module, hf_path: str) -> HfTensorNames:
    """Collect `Module.file_names` of a module and all of its parts; arguments as for
    `collect_mappings`."""
    found = HfTensorNames()
    for _, hf, part in _walk(module, "", hf_path):
        found |= part.file_names(hf)
    return found


def iter_modules(module: addons.Module) -> Iterator[Module]:
    """Yield a module and all modules in it."""
    return (part for _, _, part in _walk(module, "", ""))


def _walk(module: addons.Module, path: str, hf_path: str) -> Iterator[tuple[str, str, Module]]:
    """Yield path ("" or with a dot at its end), Hugging Face's path, and module of each part."""
    if not isinstance(module, Module) or not module.is_shared:
        if isinstance(module, Module):
            yield path, hf_path, module
        for name, child in module.named_children().items():
            own = getattr(child, "hf_name", None)
            yield from _walk(
                child, f"{path}{name}.", _joined(hf_path, name if own is None else own)
            )


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def cast(x: Tensor, dtype: popxl.dtype) -> Tensor:
    """`x` in `dtype`; `x` itself if it has that dtype."""
    return x if x.dtype == dtype else ops.cast(x, dtype)
