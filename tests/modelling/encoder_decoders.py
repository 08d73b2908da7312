"""A small model of every kind of encoder-decoder beside T5: ours, theirs, and batches."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from config.sections import RunConfig
from modelling.model_family import get_family
from tests.modelling.bart import hf as bart
from tests.modelling.t5 import test_kinds as t5_kinds
from tests.modelling.t5 import training as t5
from tests.modelling.t5gemma import hf as t5gemma
from tests.modelling.torch_training import logical

Arrays = Mapping[str, np.ndarray]


class Kind(NamedTuple):
    """A kind's small model; all learn the same number of samples a step."""

    config: Callable[..., RunConfig]
    """For data and tensor parallelism and the micro-batch."""

    model: Callable[[], torch.nn.Module]
    """A new one of transformers', whose parameters are all that it has."""

    batches: Callable[[int], list[dict[str, np.ndarray]]]
    rate: float
    silent: str = "^$"
    """Expression of weights whose gradient is nothing but rounding."""

    vocabulary: int = bart.VOCABULARY
    lora: Mapping[str, Any] = {}
    """More of PEFT's settings."""

    dtype: torch.dtype = torch.float64
    """Of the reference where it can be float64: transformers' eager attention casts scores to
    float32, where float64's least number is infinite, so that rows of padding are NaN."""

    def weights(self, model: torch.nn.Module | None = None) -> dict[str, np.ndarray]:
        """Weights by name, and buffers, which are zero; default: a new model's."""
        named = without_images(logical(model or self.model()))
        config = self.config()
        weight_map = get_family(config).weight_map(config)
        return dict(weight_map.from_hf({n: x.astype(np.float32) for n, x in named.items()}))

    def audible(self, named: Arrays) -> dict[str, np.ndarray]:
        """All but the silent weights, which AdamW would move by rounding."""
        return {n: x for n, x in named.items() if not re.search(self.silent, n)}

    @property
    def trained(self) -> str:
        """An expression of the names of all weights that torch trains."""
        return f"^(?!.*({IMAGES}))(?!.*({self.silent}))"


IMAGES = t5gemma.IMAGES


def without_images(named: Arrays) -> dict[str, np.ndarray]:
    """Weights but those for images, which an export takes over."""
    return {n: x for n, x in named.items() if not re.search(IMAGES, n)}


def _bart(kind: str) -> Kind:
    return Kind(
        partial(bart.our_config, kind),
        partial(bart.without_bias, kind),
        partial(bart.batches, kind=kind),
        bart.RATE,
        r"k_proj\.bias|final_logits_bias",
        77 if kind == "two vocabularies" else bart.VOCABULARY,
    )


def _t5gemma(kind: str) -> Kind:
    images = {"exclude_modules": rf".*({IMAGES}).*"} if t5gemma.is_merged(kind) else {}
    return Kind(
        partial(t5gemma.our_config, kind),
        lambda: copy.deepcopy(t5gemma.hf_model(kind)),
        t5gemma.batches,
        t5gemma.RATE,
        lora=images,
        dtype=torch.float32,
    )


KINDS: Mapping[str, Kind] = {
    "umt5": Kind(
        partial(t5_kinds.config_of, "umt5"),
        lambda: copy.deepcopy(t5_kinds.their_model("umt5")),
        t5.batches,
        t5.RATE,
        vocabulary=t5.VOCABULARY,
    ),
    "bart": _bart("as published"),
    **{kind: _bart(kind) for kind in ("mbart", "m2m_100", "marian", "two vocabularies", "pegasus")},
    "t5gemma": _t5gemma("wide encoder"),
    "t5gemma2": _t5gemma("t5gemma2, other sizes"),
}
