"""Base class of modules: parameters declared in `__init__` are tensors in `build`.

A declaration is an entry of the weight map (`modelling.weights.WeightMapping`): a model's weight
map is derived from its modules (`collect_mappings`), whose attributes have Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from typing import cast as typed

import numpy as np

import popxl
import popxl_addons as addons
from modelling.layers.activation_layout import ActivationLayout
from modelling.layers.parallel import ParallelGroups
from modelling.layers.run_config import current_run_config
from modelling.weights.hf_tensor_names import HfTensorNames
from modelling.weights.weight_mapping import Weight, WeightMapping
from popxl import ReplicaGrouping, Tensor
from popxl_addons.utils import cast_if_needed as cast_if_needed


def parameter(
    *shape: int,
    std: float | None = None,
    shard: int | None = None,
    max_shards: int | None = None,
    transposed: bool = False,
) -> Tensor:
    """Declares a parameter of a module, as in `self.weight = parameter(...)` in `__init__`.

    In `build`, `self.weight` is the tensor, which becomes an input of the graph at first use.

    Args:
        shape: unsharded, as in Hugging Face's model.
        std: standard deviation of initial values; 0: zeros; None: ones.
        shard: axis of the variable that is sharded over tensor parallelism; None: replicated.
        max_shards: number of shards; None: tensor_parallel.
        transposed: True if the variable is (in, out) and Hugging Face's weight (out, in).
    """
    return fused_parameter([Weight("", shape, std)], shard, max_shards, transposed)


def fused_parameter(
    weights: Sequence[Weight],
    shard: int | None = None,
    max_shards: int | None = None,
    transposed: bool = False,
    **fields: Any,
) -> Tensor:
    """Declares a variable that concatenates several Hugging Face weights.

    Args:
        weights: named relative to the module; "": as the attribute.
        shard, max_shards, transposed: see `parameter`.
        fields: further fields of the `WeightMapping`.
    """
    shard_replicas = 1
    if max_shards is not None:
        shard_replicas = max(current_run_config().execution.tensor_parallel // max_shards, 1)
    return declare_variable(
        WeightMapping(
            "", tuple(weights), transposed, shard, shard_replicas=shard_replicas, **fields
        )
    )


def declare_variable(mapping: WeightMapping) -> Tensor:
    """Declares the variable of a weight mapping, named by the attribute that it is assigned to."""
    # `Module.__setattr__` stores the declaration; `build` sees the tensor.
    return typed(Tensor, _ParameterDeclaration(mapping))


@dataclass(frozen=True)
class _ParameterDeclaration:
    mapping: WeightMapping


class Module(addons.Module):
    """Base class of a model's modules, with declared parameters.

    Attributes:
        config: of the run that it is built for.
        layout: of activations.
        hf_name: this module's name in Hugging Face's model, if it is not the attribute's; "": it is
            not there.
        is_shared: True if its variables belong to another module, which has their mappings.
        dropout_adapters: the adapters of a layer that need a seed, see `seed_adapters`.
    """

    hf_name: str | None = None
    is_shared = False
    dropout_adapters: tuple[Any, ...] = ()

    def __init__(self, hf_name: str | None = None) -> None:
        super().__init__()
        self.config = current_run_config()
        self.layout = ActivationLayout.from_config(self.config)
        self._mappings: dict[str, WeightMapping] = {}
        self._tensors: dict[str, Tensor] = {}
        if hf_name is not None:
            self.hf_name = hf_name

    def __setattr__(self, key: str, value: Any) -> None:
        if isinstance(value, _ParameterDeclaration):
            mapping = value.mapping
            named = tuple(replace(w, name=w.name or key) for w in mapping.weights)
            self._mappings[key] = replace(mapping, path=key, weights=named)
        else:
            super().__setattr__(key, value)

    if not TYPE_CHECKING:  # so that mypy still finds misspelled attributes

        def __getattr__(self, key: str) -> Tensor:
            if key not in self.__dict__.get("_mappings", {}):
                raise AttributeError(f"{type(self).__name__} has no attribute {key!r}")
            if key not in self._tensors:
                self._tensors[key] = self._add_parameter(self._mappings[key])
            return self._tensors[key]

    def _clear(self) -> None:
        self._tensors = {}
        super()._clear()

    @property
    def groups(self) -> ParallelGroups:
        """The tensor- and data-parallel replica groups of the current Ir."""
        return ParallelGroups.from_current_ir(self.config.execution.tensor_parallel)

    @property
    def dtype(self) -> popxl.dtype:
        """The dtype of parameters and activations in the current run configuration."""
        return popxl.dtype.as_dtype(self.config.model.precision)

    def file_names(self, hf_path: str) -> HfTensorNames:
        """Returns alternative names of this module's parameters in Hugging Face files.

        Args:
            hf_path: the module's path in Hugging Face's model.
        """
        return HfTensorNames()

    def extract_submodule(self, name: str) -> Module:
        """Moves the submodule `name` into a new module and returns the new module.

        This module uses it as before; its variables are then those of the new module alone.
        """
        owner = Module()
        setattr(owner, name, self._submodules.pop(name))
        return owner

    def resize_sharded_axes(self, size: int) -> None:
        """Changes the length of the axis along which each parameter of this module is sharded."""
        for key, mapping in self._mappings.items():
            if mapping.axis is not None:
                axis = 1 - mapping.axis if mapping.transpose else mapping.axis
                weights = tuple(
                    replace(w, shape=(*w.shape[:axis], size, *w.shape[axis + 1 :]))
                    for w in mapping.weights
                )
                self._mappings[key] = replace(mapping, weights=weights)

    # ---- variables ------------------------------------------------------------------------------
    def is_quantizable(self, mapping: WeightMapping) -> bool:
        """True if a weight mapping's parameter can be quantized."""
        return False

    def _add_parameter(self, mapping: WeightMapping) -> Tensor:
        """Adds the graph inputs of a declared parameter; returns its (dequantized) tensor."""
        groups = self.groups
        shape = mapping.shape_on_replica(groups.tensor_parallel)
        sharded = mapping.axis is not None and mapping.is_sharded
        grouping = groups.shard_grouping(mapping.shard_replicas) if sharded else None
        quant = self.config.model.layer_quant if self.is_quantizable(mapping) else None
        if quant is None:
            dtype = popxl.float32 if mapping.is_adapter else self.dtype
            return self.add_parameter(mapping.path, shape, dtype, grouping)
        from modelling.quantization import (
            QUANT_DTYPES,
            QUANT_FIELDS,
            dequantize_weight,
            quantized_shapes,
        )

        shapes = quantized_shapes((shape[0], shape[1]), quant, mapping.input_axis)
        fields = [
            self.add_parameter(f"{mapping.path}.{field}", s, d, grouping)
            for field, s, d in zip(QUANT_FIELDS, shapes, QUANT_DTYPES, strict=True)
        ]
        return dequantize_weight(fields, quant, self.dtype, mapping.input_axis)

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: popxl.dtype,
        grouping: ReplicaGrouping | None = None,
    ) -> Tensor:
        """Adds a graph input for a variable of this shape and dtype; returns the input.

        The factory's data are zeros that take no memory: initial values are random numbers that
        belong to the unsharded model (see `modelling.weights`), and a graph can be built, and its
        memory planned, for weights too large for this machine.

        Args:
            shape: on a replica.
            grouping: replicas with the same shard; None: all.
        """
        zeros = np.broadcast_to(np.zeros((), dtype.as_numpy()), shape)
        return self.add_variable_input(name, zeros, dtype, replica_grouping=grouping)


def collect_mappings(module: addons.Module, hf_path: str) -> list[WeightMapping]:
    """Returns the weight mappings of a module's parameters, for the weight map.

    Args:
        hf_path: the module's path in Hugging Face's model.
    """
    return [
        replace(
            mapping,
            path=f"{path}{mapping.path}",
            weights=tuple(replace(w, name=_join_path(hf, w.name)) for w in mapping.weights),
        )
        for path, hf, child in _walk_modules(module, "", hf_path)
        for mapping in child._mappings.values()
    ]


def collect_file_names(module: addons.Module, hf_path: str) -> HfTensorNames:
    """Merges the alternative file names (`Module.file_names`) of a module and its submodules.

    Args:
        hf_path: the module's path in Hugging Face's model.
    """
    names = HfTensorNames()
    for _, hf, child in _walk_modules(module, "", hf_path):
        names |= child.file_names(hf)
    return names


def iter_modules(module: addons.Module) -> Iterator[Module]:
    """Yields a module and all its submodules."""
    return (child for _, _, child in _walk_modules(module, "", ""))


def _walk_modules(
    module: addons.Module, path: str, hf_path: str
) -> Iterator[tuple[str, str, Module]]:
    """Yields each submodule with its path (ending in a dot) and its path in Hugging Face files."""
    if not isinstance(module, Module) or not module.is_shared:
        if isinstance(module, Module):
            yield path, hf_path, module
        for name, child in module.named_children().items():
            hf_name = getattr(child, "hf_name", None)
            yield from _walk_modules(
                child, f"{path}{name}.", _join_path(hf_path, name if hf_name is None else hf_name)
            )


def _join_path(*names: str) -> str:
    return ".".join(filter(None, names))
