"""FP8 training: a context manager for linear layers, and the scaling state of their matmuls.

Recipes are those of Transformer Engine (docs.nvidia.com/deeplearning/transformer-engine); formats
and method are from Micikevicius et al., arXiv:2209.05433. Arithmetic: `popxl.ops.fp8`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import popxl
from popxl import ops
from popxl.ops.fp8_e4m3_e5m2 import EXACT, OPERANDS, AmaxOf, ScaleRule
from popxl_addons.matrix_product import MatrixProduct, use_matrix_products
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

SCALE, HISTORY, STEP = "scale", "amax_history", "step"
"""Names of an FP8 product's variables."""


@dataclass(frozen=True)
class Recipe:
    """Base class of FP8 scaling recipes, which are `CurrentScaling` and `DelayedScaling`.

    Attributes:
        format: "hybrid": e4m3 forwards, e5m2 for gradients; "e4m3": e4m3 for all.
        rule: how a scale follows from the largest absolute value.
    """

    format: str = "hybrid"
    rule: ScaleRule = EXACT


@dataclass(frozen=True)
class CurrentScaling(Recipe):
    """FP8 scaling by the amax (largest magnitude) of each matmul's current operands; stateless."""


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 scaling by the amaxes (largest magnitudes) that a matmul's operands had in earlier steps.

    Attributes:
        history: number of steps that are remembered.
        amax_of: "max": of these steps the largest amax counts; "most_recent": the latest.
        interval: weight updates between changes of the scales.
    """

    history: int = 1024
    amax_of: AmaxOf = "max"
    interval: int = 1

    @property
    def variables(self) -> dict[str, np.ndarray]:
        """Return initial values of the scales and amax histories of one matmul.

        Both are in the order of `popxl.ops.fp8.OPERANDS`.

        The first step scales by 1, as Transformer Engine's.
        """
        n = len(OPERANDS)
        values: dict[str, Any] = {
            SCALE: np.ones(n, np.float32),
            HISTORY: np.zeros((n, self.history), np.float32),
        }
        return values | ({STEP: np.zeros((), np.int32)} if self.interval > 1 else {})

    def update(self, state: NamedTensors, amax: popxl.Tensor) -> NamedTensors:
        """Return the new scales and amax histories of one matmul, for the next optimizer step.

        Args:
            state: their values.
            amax: float32 (3,), the largest of all micro-batches and replicas of the step.
        """
        values = ops.fp8.delayed_scales(
            state.get(SCALE),
            state.get(HISTORY),
            amax,
            state.get(STEP) if self.interval > 1 else None,
            format=self.format,
            rule=self.rule,
            amax_of=self.amax_of,
            interval=self.interval,
        )
        return NamedTensors.pack(self.variables, values)


@contextmanager
def fp8_autocast(recipe: Recipe | None = DelayedScaling()) -> Iterator[None]:
    """Context manager: linear layers created inside multiply in FP8, scaled by `recipe`.

    With delayed scaling they have variables of the kind "fp8" (see `VariableFactory`):
    `product.scale`, a graph input, and `product.amax_history`, which only `update_fp8` uses.

    Args:
        recipe: None: layers made inside are ordinary ones.

    Example:
        >>> with fp8_autocast(DelayedScaling(history=16)):
        ...     layer = Linear(64)
        >>> facts, graph = layer.create_graph(x)
    """
    with use_matrix_products(MatrixProduct if recipe is None else partial(FP8Product, recipe)):
        yield


class FP8Product(MatrixProduct):
    """Module of a linear layer's matmul in FP8: x @ weight + bias.

    Variables, with delayed scaling: those of `DelayedScaling.variables`, the same on all replicas.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def build(
        self,
        x: popxl.Tensor,
        weight: popxl.Tensor,
        bias: popxl.Tensor | None = None,
        output_type: popxl.dtype | None = None,
    ) -> popxl.Tensor:
        """Multiply x (..., in_features) by weight (in_features, out_features) in FP8; add bias."""
        recipe, scale = self.recipe, self._add_scaling_state()
        return ops.fp8.linear(
            x,
            weight,
            scale,
            bias=bias,
            format=recipe.format,
            rule=recipe.rule if scale is None else None,
            powers_of_2=recipe.rule.power_of_2,
            output_type=output_type,
        )

    def _add_scaling_state(self) -> popxl.Tensor | None:
        """Add the input `scale`, and factories of the other scaling state; None if stateless."""
        if not isinstance(self.recipe, DelayedScaling):
            return None
        facts = {
            name: FP8Factory(name, value, is_input=name == SCALE)
            for name, value in self.recipe.variables.items()
        }
        scale = self.add_variable_factory(facts.pop(SCALE))
        for name, factory in facts.items():
            self.register_hidden_variable(factory, name)
        return scale


class FP8Factory(VariableFactory):
    """Variable factory of a matmul's FP8 state, which is equal on all replicas."""

    kind = "fp8"

    def __init__(self, name: str, value: np.ndarray, is_input: bool) -> None:
        super().__init__(value, name=name)
        self.is_input = is_input

    def next_data(self, empty: bool = False) -> np.ndarray:
        """Return the initial value, also if `empty`, since a scale of 0 is invalid."""
        return super().next_data()


def names_of_fp8_products(facts: NamedVariableFactories) -> list[str]:
    """Names of the matmuls that have FP8 state; `<name>.scale` is one of each one's variables."""
    names = facts.of_kind("fp8").keys_flat()
    return [n.removesuffix(f".{SCALE}") for n in names if n.endswith(f".{SCALE}")]


def update_fp8(
    recipe: Recipe,
    facts: NamedVariableFactories,
    variables: NamedTensors,
    amaxes: NamedTensors,
) -> None:
    """Update a module's FP8 scales and amax histories in place, after an optimizer step.

    What is observed on any replica counts for all: their scales stay the same.

    Args:
        recipe: that of `fp8_autocast`.
        facts: the module's factories.
        variables: its variables, by the names of `facts`.
        amaxes: what was observed since the last update, by the names of the scales: accumulators of
            `autodiff_with_accumulation`.

    Raises:
        TypeError: the module was made with delayed scaling, and `recipe` is another.
    """
    for name in names_of_fp8_products(facts):
        if not isinstance(recipe, DelayedScaling):
            raise TypeError(
                f"update_fp8: {name} was made with DelayedScaling, not {type(recipe).__name__}: "
                "give the recipe of its fp8_autocast"
            )
        state = variables.get(name)
        amax = ops.collectives.replicated_all_reduce(amaxes.get(f"{name}.{SCALE}"), "max")
        for key, t in recipe.update(state, amax).to_dict().items():
            ops.var_updates.copy_var_update_(state.get(key), t)
