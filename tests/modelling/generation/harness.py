"""What the families' generation tests share: references, and logits at forced tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import popxl
from config.sections import RunConfig
from modelling.generation import ResidentModel, SearchContext, SpecialTokenIds, generate_tokens
from modelling.generation.generator import GeneratorFactory
from modelling.generation.single_sequence import SingleSequenceSearch
from modelling.layers import ParallelGroups, use_run_config
from modelling.weights import WeightMap
from popxl import Tensor, ops
from popxl_addons import NamedTensors
from popxl_addons.patterns import apply_pre_alias_patterns
from tests.modelling.sessions import inference

PROMPTS = 64


@dataclass(frozen=True)
class Reference:
    """Hugging Face's weights, prompts padded on the right, and what it generates from them."""

    weights: dict[str, np.ndarray]
    input_ids: np.ndarray
    mask: np.ndarray
    tokens: np.ndarray = field(repr=False)


def right_padded(rng: np.random.Generator, length: int) -> np.ndarray:
    """Masks of prompts of all lengths, the shortest and the longest among them."""
    lengths = rng.integers(1, length, PROMPTS, endpoint=True)
    lengths[:2] = 1, length
    return (np.arange(length) < lengths[:, None]).astype(np.int32)


def check_worth(tokens: np.ndarray, end: int) -> None:
    """The reference's sequences must differ, in length too."""
    ended = (tokens[:, :-1] == end).any(1)
    assert 5 < ended.sum() < PROMPTS - 5
    assert len(np.unique(tokens)) > 20
    assert len(np.unique(tokens, axis=0)) > 40


def hf_generated(hf: Any, prompt: np.ndarray, length: int, pad: int, **settings: Any) -> np.ndarray:
    """What transformers writes for one prompt without padding: (length,), padded after its end.

    Args:
        settings: of the search.
    """
    ids = torch.tensor(prompt[None]).long()
    mask = torch.ones_like(ids)
    settings |= {"max_new_tokens": length, "pad_token_id": pad, "do_sample": False}
    written = hf.generate(input_ids=ids, attention_mask=mask, **settings)[0].numpy()
    found = written[1 if hf.config.is_encoder_decoder else len(prompt) :]
    return np.concatenate([found, np.full(length - len(found), pad)])


def hf_greedy(
    hf: Any, input_ids: np.ndarray, mask: np.ndarray, length: int, pad: int
) -> np.ndarray:
    """The same for several prompts, padded on the right: (prompts, length)."""
    prompts = [row[:n] for row, n in zip(input_ids, mask.sum(1), strict=True)]
    return np.stack([hf_generated(hf, prompt, length, pad) for prompt in prompts])


def hf_beams(
    hf: Any,
    prompt: np.ndarray,
    length: int,
    beams: int,
    penalty: float,
    end: int | list[int],
    pad: int,
) -> np.ndarray:
    """What transformers' beam search finds for one prompt: (length,), padded after its end."""
    search = {"num_beams": beams, "length_penalty": penalty, "eos_token_id": end}
    tokens = hf_generated(hf, prompt, length, pad, **search)
    ends = np.isin(tokens, end)
    after = np.cumsum(ends) - ends > 0
    return np.where(after, pad, tokens)


def memory_of_layers(config_of: Callable[[int], RunConfig], few: int, many: int) -> int:
    """Bytes that the layers of a program with many add to its intermediate values."""
    sizes = [inference(config_of(n)).session.memory_use().temporaries for n in (few, many)]
    return sizes[1] - sizes[0]


class Forced(SingleSequenceSearch):
    """A search that follows given tokens instead of choosing, and keeps the logits."""

    def __init__(self, context: SearchContext, batch: int, part: int) -> None:
        object.__setattr__(self, "context", context)
        streams = (
            popxl.d2h_stream((batch, part), popxl.float32, "cached"),
            popxl.h2d_stream((batch,), popxl.int32, "tokens"),
        )
        object.__setattr__(self, "logits", streams[0])
        object.__setattr__(self, "said", streams[1])

    def choose_tokens(self, logits: Tensor, position: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        ops.host_store(self.logits, logits)
        return ops.host_load(self.said)


Beside = Callable[[NamedTensors, Tensor, Tensor], Tensor]
"""Adds ops to generation, from the weights, the words and the mask, whose result is wanted."""


def forced_logits(
    config: RunConfig,
    make_generator: GeneratorFactory,
    weight_map: WeightMap,
    expected: Reference,
    forced: np.ndarray,
    beside: Beside | None = None,
    data_parallel: int = 1,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The logits from which a family's generation would choose, when it is given its tokens.

    Copies of the model do the same; what the last one does is returned.

    Args:
        forced: int32 (batch, positions), read one after the other, for the first prompts.

    Returns:
        float32 (batch, positions, vocabulary); and what `beside` computes, of each replica.
    """
    (batch, positions), tp = forced.shape, weight_map.tensor_parallel
    ir = popxl.Ir(replication=data_parallel * tp)
    ir.num_host_transfers = positions
    with ir.main_graph, use_run_config(config):
        groups, generator = ParallelGroups.from_current_ir(tp), make_generator(config, 1)
        model = ResidentModel(generator, batch, groups)
        weights = model.facts.init(empty=True)
        input_ids, mask = (popxl.variable(x[:batch]) for x in (expected.input_ids, expected.mask))
        context = SearchContext(groups, SpecialTokenIds(-1, -1), generator.output_length)
        choose = Forced(context, batch, weight_map.weights[-1].shape[0] // tp)
        start = model.prefill(weights, input_ids, mask)
        generate_tokens(start, generator.output_length, choose, [], groups)
        other = None if beside is None else _stored(beside(weights, input_ids, mask))
    apply_pre_alias_patterns(ir)
    trees = {name: NamedTensors(fwd=weights.get(name)) for name in weight_map.layers}
    with popxl.Session(ir, "cpu") as session:
        session.write_variables_data(weight_map.to_variables(expected.weights, trees))
        out = session.run({choose.said: np.repeat(forced.T[:, None], data_parallel * tp, 1)})
    found = out[choose.logits].reshape(positions, data_parallel * tp, batch, -1)[:, -tp:]
    logits = found.transpose(2, 0, 1, 3).reshape(batch, positions, -1)
    return logits, None if other is None else out[other]


def _stored(t: Tensor) -> popxl.DeviceToHostStream:
    stream = popxl.d2h_stream(t.shape, t.dtype, "beside")
    ops.host_store(stream, t)
    return stream
