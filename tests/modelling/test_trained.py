"""Some weights trained (`training.trained`, `training.frozen`), against torch, in which the others
need no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import tests.modelling.gptj.training as gptj
import tests.modelling.llama.training as llama
import tests.modelling.t5.training as t5
from config.sections import RunConfig
from modelling.spec import family_of
from tests.modelling.gptj.hf import hf_model, small_config
from tests.modelling.llama.hf import hf_config
from tests.modelling.llama.hf import our_config as llama_config
from tests.modelling.sessions import fine_tuning
from tests.modelling.torch_training import Reference, check_training, logical

STEPS = 3


class Kind(NamedTuple):
    """A small model of three layers, and its training in torch."""

    config: Callable[..., Any]
    batches: Callable[[int], Any]
    reference: Callable[[str], tuple[dict[str, np.ndarray], Reference]]
    """Weights before, and what training gives those in whose names a regular expression is."""

    rate: float


def llama_kind(name: str) -> Kind:
    return Kind(
        lambda **split: llama_config(hf_config(name), **split),
        llama.batches,
        lambda only: llama.trained(hf_config(name), llama.batches(STEPS), only=only),
        llama.RATE,
    )


KINDS = {
    "t5": Kind(
        t5.our_config,
        t5.batches,
        lambda only: (logical(t5.their_model()), t5.reference(STEPS, only=only)),
        t5.RATE,
    ),
    "gptj": Kind(
        small_config,
        gptj.batches,
        lambda only: (logical(hf_model(small_config())), gptj.reference(STEPS, only=only)),
        gptj.RATE,
    ),
    "gemma2": llama_kind("gemma2"),  # tied; layers with windows and without
    "phi3": llama_kind("phi3"),  # whose files have q, k and v as one
}

CHOICES: dict[str, tuple[dict[str, str], str]] = {
    # what we are told, and the names that torch trains
    "t5/last layers": ({"trained": "decoder.1,decoder.2"}, r"decoder\.block\.[12]"),
    "t5/norms": ({"trained": "*norm*"}, "norm"),
    "t5/no embeddings": ({"frozen": "encoder.embed_tokens"}, "^(?!shared|.*embed_tokens)"),
    "t5/the encoder's": (
        {"trained": "encoder*", "frozen": "*norm*,shared"},
        "^encoder(?!.*(norm|embed))",
    ),
    "t5/positions": ({"trained": "*relative_attention_bias*"}, "relative_attention_bias"),
    "gptj/last layers": ({"trained": "transformer.h.1,layer.2"}, r"\.h\.[12]"),
    "gptj/norms": ({"trained": "*ln_*"}, "ln_"),
    "gptj/no embeddings": ({"frozen": "embeddings"}, "^(?!transformer.wte)"),
    "gptj/every other": ({"trained": "layer.0,layer.2"}, r"\.h\.[02]"),
    "gptj/head": ({"trained": "lm_head"}, "lm_head"),
    "gemma2/last layers": ({"trained": "layer.1,layer.2"}, r"layers\.[12]"),
    "gemma2/norms": ({"trained": "*norm*"}, "norm"),
    "gemma2/no embeddings": ({"frozen": "lm_head"}, "^(?!.*embed)"),
    "gemma2/embeddings": ({"trained": "lm_head"}, "embed"),
    "phi3/last layers": ({"trained": "model.layers.1,model.layers.2"}, r"layers\.[12]"),
    "phi3/attention": ({"trained": "*qkv_proj*"}, "qkv_proj"),
}
IN_BRIEF = {"t5/last layers", "gptj/every other", "gemma2/no embeddings", "phi3/attention"}


def chosen(config: RunConfig, **training: Any) -> Any:
    """The configuration with other fields of its section on training."""
    found = config.to_dict()
    found["training"] |= training
    return type(config).from_dict(found)


def cases() -> Iterator[Any]:
    for number, name in enumerate(CHOICES):
        for dp, tp in ((1, 1), (2, 2)):
            brief = name in IN_BRIEF and (dp, tp) == ((1, 1), (2, 2))[number % 2]
            yield pytest.param(name, dp, tp, marks=[] if brief else pytest.mark.slow)


@pytest.mark.parametrize(("name", "dp", "tp"), list(cases()))
def test_as_torch_trains_them(name: str, dp: int, tp: int) -> None:
    """Loss, each gradient, three steps of AdamW; the others keep their bits."""
    kind, (told, only) = KINDS[name.partition("/")[0]], CHOICES[name]
    start, expected = kind.reference(only)
    config = chosen(kind.config(dp=dp, tp=tp, micro_batch=2), **told)
    table = family_of(config).weights(config)
    model = fine_tuning(config, gradients=True)
    model.write(table.renamed(start))
    weights = check_training(
        model,
        kind.batches(STEPS),
        expected,
        kind.rate,
        lambda ours: dict(table.for_files(ours)),
    )
    for name in start.keys() - expected.gradients.keys():
        assert weights[name].tobytes() == start[name].tobytes(), name
