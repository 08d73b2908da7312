"""Losses of preferences written out in torch, on the models of transformers: a text at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from config.sections import RunConfig
from data.examples import Example, TokenizedText
from data.preference_samples import PreferencePair, SamplesWithRefLogps
from data.sample_format import SampleFormat
from data.samples import Batch

OBJECTIVES = ("dpo", "ipo", "hinge", "simpo", "orpo", "cpo", "kto")
Logps = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""The log-probability of each text of a batch, [units, 2], with gradients."""


def random_units(count: int, vocabulary: int, longest: int, kto: bool) -> list[PreferencePair]:
    """Prompts and answers of random tokens; two answers of a unit have one prompt."""
    rng = np.random.default_rng(3)

    def random_ids(most: int) -> np.ndarray:
        return rng.integers(3, vocabulary, rng.integers(1, most + 1), np.int32)

    def text(prompt: np.ndarray) -> TokenizedText:
        ids = np.append(prompt, random_ids(longest))
        return TokenizedText(ids, np.arange(len(ids)) >= len(prompt))

    units = []
    for index in range(count):
        prompt = np.append(random_ids(3), np.int32(3))
        desirable = bool(rng.integers(2)) if kto else None
        example = Example("", "", desirable=desirable)
        units.append(PreferencePair((text(prompt), text(prompt)), (example, example), index))
    return units


def batches_of(
    config: RunConfig,
    shape: SampleFormat,
    units: list[PreferencePair],
    reference: Logps,
    count: int,
) -> list[Batch]:
    """Global batches, with what a reference says of their texts."""
    tokenizer: Any = SimpleNamespace(
        pad_token_id=config.model.pad_token_id,
        eos_token_id=config.model.eos_token_id,
        affix_ids=((), ()),
        num_end_tokens=1,
        count_leading_special_tokens=lambda ids: 0,
    )
    samples = shape.make_pair_samples(config, units, tokenizer)
    rows = np.arange(len(samples))
    with torch.no_grad():
        whole = {n: torch.tensor(x).long() for n, x in samples.take(rows).items()}
        logps = reference(whole).float().numpy().reshape(len(rows), -1, 2)
    referred, size = SamplesWithRefLogps(samples, logps), config.training.global_batch_size
    assert len(samples) >= size * count
    return [referred.take(np.arange(i * size, (i + 1) * size)) for i in range(count)]


def decoder_logps(model: Any) -> Logps:
    """Of a model of one stream, from texts with segments."""

    def logps(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found, places = [], 2 * (len(batch["num_loss_tokens"]) // len(batch["input_ids"]))
        rows = zip(batch["input_ids"], batch["labels"], batch["segment_ids"], strict=True)
        for input_ids, labels, numbers in rows:
            for number in range(1, places + 1):
                own = numbers == number
                if not own.any():
                    found.append(torch.zeros(()))
                    continue
                logits = model(input_ids=input_ids[own][None]).logits[0]
                found.append(_logp(logits, labels[own]))
        return torch.stack(found).reshape(-1, 2)

    return logps


def t5_logps(model: Any) -> Logps:
    """Of an encoder-decoder, from two targets of each prompt."""

    def logps(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found, answers = [], len(batch["labels"])
        each = answers // len(batch["input_ids"])
        for row in range(answers):
            sample, place = divmod(row, each)
            labels = batch["labels"][row]
            prompt = batch["input_ids"][sample][batch["segment_ids"][sample] == place // 2 + 1]
            if not (labels >= 0).any():
                found.append(torch.zeros(()))
                continue
            read = batch["decoder_input_ids"][row][None]
            logits = model(input_ids=prompt[None], decoder_input_ids=read).logits[0]
            found.append(_logp(logits, labels))
        return torch.stack(found).reshape(-1, 2)

    return logps


def _logp(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    there = labels >= 0
    logps = torch.log_softmax(logits.double()[there], -1)
    return logps.gather(1, labels[there][:, None]).sum()


def loss_of(
    name: str,
    logps: torch.Tensor,
    reference: torch.Tensor,
    num_loss_tokens: torch.Tensor,
    kto_labels: torch.Tensor | None = None,
    groups: int = 1,
    beta: float = 0.1,
    gamma: float = 0.5,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """The mean over the units that are there.

    Args:
        sign: of kto: 1 where the first text of a unit is desirable, -1 where not.
        groups: of kto: parts of the batch with an estimate of the divergence each.
    """
    if name == "kto":
        return _kto(logps - reference, num_loss_tokens, kto_labels, groups, beta)
    there = num_loss_tokens[:, 0] > 0
    logps, reference, num_loss_tokens = logps[there], reference[there], num_loss_tokens[there]
    means = logps / num_loss_tokens
    c, r = (logps - reference).T
    if name in ("simpo", "orpo"):
        c, r = means.T
    if name == "cpo":
        c, r = logps.T
    if name == "ipo":
        c, r = (means - reference / num_loss_tokens).T
        return ((c - r - 1 / (2 * beta)) ** 2).mean()
    if name == "hinge":
        return torch.relu(1 - beta * (c - r)).mean()
    if name == "orpo":
        odds = (c - r) - (torch.log1p(-torch.exp(c)) - torch.log1p(-torch.exp(r)))
        return (-c - beta * logsigmoid(odds)).mean()
    logits = beta * (c - r) - (gamma if name == "simpo" else 0)
    losses = -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)
    return (losses - (means[:, 0] if name == "cpo" else 0)).mean()


def _kto(
    ratios: torch.Tensor,
    num_loss_tokens: torch.Tensor,
    kto_labels: torch.Tensor | None,
    groups: int,
    beta: float,
) -> torch.Tensor:
    assert kto_labels is not None
    losses = []
    parts = zip(*(t.chunk(groups) for t in (ratios, num_loss_tokens, kto_labels)), strict=True)
    for ratio, count, mark in parts:
        there = count[:, 0] > 0
        z = ratio[there, 1].mean().detach().clamp(min=0) if there.any() else 0
        losses.append(1 - torch.sigmoid(mark[there, 0] * beta * (ratio[there, 0] - z)))
    return torch.cat(losses).mean()


def as_float(batch: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """An array of a batch in float64."""
    return torch.tensor(np.asarray(batch[name], np.float64)) if name in batch else None


def close(found: float, expected: float) -> bool:
    """True if two numbers are equal within float32 rounding."""
    return math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-5)
