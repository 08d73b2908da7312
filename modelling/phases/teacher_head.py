"""A teacher's head held beside its student's: it makes logits of the teacher's hidden states.

A pass of the teacher stores its last hidden states, so its layers are loaded once, and the student
is compared with exact logits of the whole vocabulary, which would be too large to store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

import popxl
from checkpoints.lazy_arrays import Arrays, ArraysView
from config.errors import ConfigError
from config.sections import RunConfig
from modelling.layers.head_loss import HeadLoss
from modelling.layers.lm_head_loss import TEACHER, LMHeadLoss
from modelling.layers.module import collect_mappings
from modelling.layers.run_config import use_run_config
from modelling.weights import WeightMap, WeightMapping
from modelling.weights.weight_map import HEAD_LAYER

if TYPE_CHECKING:
    from modelling.objectives import TeacherStates

USED_MODULES = "lm_head", "tokens"
"""The phase with the head; the modules of an output layer that make logits."""


@dataclass(frozen=True)
class TeacherHead:
    """The head of a distillation's teacher, with as many rows as the student's.

    Rows that the student's head lacks are cut, since no text has their tokens; missing ones are 0,
    and the objective leaves them out.

    Attributes:
        config: of the teacher's pass.
        vocab_size: rows of the student's head.
        make_head: builds the teacher's output layer.
        weights: returns the teacher's weights; None: for plans, which need none.
    """

    config: RunConfig
    vocab_size: int
    make_head: Callable[[], HeadLoss]
    weights: Callable[[], Arrays] | None = None

    def build_head(self) -> LMHeadLoss:
        """Build the teacher's output layer; its parameters are its own, also a tied embedding."""
        with use_run_config(self.config):
            head = self.make_head()
        assert isinstance(head, LMHeadLoss), "a teacher is a language model"
        head.lm_head.vocab_size = self.vocab_size
        for name in USED_MODULES:
            module = getattr(head, name, None)
            if module is not None:
                module.is_shared = False
                module.resize_sharded_axes(self.vocab_size)
        return head

    @cached_property
    def mappings(self) -> tuple[WeightMapping, ...]:
        """Weight mappings of the teacher's head, frozen variables of the student's head phase."""
        return tuple(
            replace(
                mapping,
                path=f"{TEACHER}.{mapping.path}",
                weights=tuple(replace(w, name=f"{TEACHER}/{w.name}") for w in mapping.weights),
                trainable=False,
            )
            for mapping in collect_mappings(self.build_head(), "")
            if mapping.path.split(".")[0] in USED_MODULES
        )

    def check_supported(self) -> None:
        """Raise ConfigError if the head has adapters or rows of its own for some tokens."""
        if any(mapping.is_adapter for mapping in self.mappings) or self.config.trained_tokens:
            raise ConfigError(
                "training.top_k null holds the teacher's head, which has an adapter or trained "
                "tokens: merge them with run_export.py --merge, and give the export as "
                "training.teacher"
            )

    def extend_weight_map(self, weight_map: WeightMap) -> WeightMap:
        """Return the weight map of a student's program, with the teacher's head."""
        (layer,) = weight_map.phases[HEAD_LAYER]
        layers = {**weight_map.layers, layer: (*weight_map.layers[layer], *self.mappings)}
        return replace(weight_map, layers=layers)

    def head_weight_map(self, student_weight_map: WeightMap) -> WeightMap:
        """Return the part of `extend_weight_map` that the student's weights do not have."""
        held = set(self.mappings)
        return self.extend_weight_map(student_weight_map).filter_mappings(
            lambda mapping: mapping in held
        )

    @property
    def arrays(self) -> Arrays:
        """The teacher's weights by the names of `mappings`, with the student's number of rows."""
        from popxl_addons.array_munging import pad_axis

        assert self.weights is not None, "a plan reads no weights"
        shapes = {w.name: w.shape for mapping in self.mappings for w in mapping.weights}

        def resize(name: str, array: np.ndarray) -> np.ndarray:
            for axis, size in enumerate(shapes[name]):
                array = np.take(array, range(min(size, array.shape[axis])), axis)
                array = pad_axis(array, size, axis)
            return array

        renamed = {name: name.partition("/")[2] for name in shapes}
        return ArraysView(self.weights(), None, resize, shapes, renamed)

    @property
    def states(self) -> TeacherStates:
        """The teacher's hidden states, in the dtype of its activations."""
        from modelling.objectives import TeacherStates

        model = self.config.model
        dtype = popxl.dtype.from_name(model.precision)
        return TeacherStates(model.hidden_size, dtype, model.output_vocab_size)
