"""Outputs of a frozen model for each loss token: those of transformers' model at every split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config.sections import RunConfig
from data.causal_lm import PackedSequences, TokenStream
from data.samples import IGNORE_INDEX, Samples
from data.seq2seq import EncodedExamples, PackedExamples
from data.token_outputs import SamplesWithTokenOutputs
from modelling.layers import LMHeadLoss
from run.frozen_outputs import FrozenModel, OutputKind, token_logps_kind, top_tokens_kind
from tests.modelling.gptj import hf as gptj
from tests.modelling.sessions import transposed
from tests.modelling.t5 import training as t5
from tests.modelling.token_logits import decoder_token_logits, seq2seq_token_logits
from tests.modelling.torch_training import logical
from tests.slow import slow

SAMPLES = 21


def texts(longest: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Random texts of at least two tokens one after the other, and their starts."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, longest + 1, SAMPLES, endpoint=True)
    return rng.integers(3, vocabulary, lengths.sum(), np.int32), np.cumsum([0, *lengths])


def gptj_samples(config: RunConfig, places: int) -> Samples:
    """Texts of which the first token, and a third of the others, is not in the loss."""
    tokens, starts = texts(8, gptj.VOCABULARY)
    targets = np.where(tokens % 3 == 0, IGNORE_INDEX, tokens).astype(np.int32)
    stream = TokenStream(tokens, targets, starts)
    length, pad = config.model.sequence_length, config.model.pad_token_id
    return PackedSequences.from_stream(stream, length, pad, places)


def t5_samples(config: RunConfig, places: int) -> Samples:
    tokens, starts = texts(t5.ENC - 1, t5.VOCABULARY)
    rng = np.random.default_rng(1)
    targets = rng.integers(2, t5.VOCABULARY, (SAMPLES, t5.DEC), np.int32)
    targets[np.arange(t5.DEC) >= rng.integers(1, t5.DEC + 1, (SAMPLES, 1))] = IGNORE_INDEX
    examples = EncodedExamples(tokens, starts, targets, t5.ENC, 0)
    return examples if places == 1 else PackedExamples.from_examples(examples, places)


def case(family: str, dp: int, tp: int, micro: int, places: int) -> tuple[RunConfig, Samples, Any]:
    """A configuration for inference, samples with several texts, and transformers' model."""
    if family == "gptj":
        config: RunConfig = gptj.small_config(dp, tp, micro)
        samples, hf = gptj_samples(config, places), gptj.hf_model(gptj.small_config())
        data = replace(config.data, packing=False)
    else:
        config = t5.our_config(dp, tp, micro, layers=1)
        samples, hf = t5_samples(config, places), t5.their_model(1)
        data = config.data
    data = replace(data, examples_per_sample=places)  # type: ignore[call-arg]
    model = replace(config.model, eval=True)
    return transposed(replace(config, data=data, model=model), dp == 2), samples, hf


def their_logits(family: str, hf: Any, samples: Samples) -> np.ndarray:
    """Logits of all loss tokens by transformers' model in float64."""
    of = (decoder_token_logits if family == "gptj" else seq2seq_token_logits)(hf.double())
    batch = samples.take(np.arange(len(samples)))
    with torch.no_grad():
        found = of({name: torch.tensor(x).long() for name, x in batch.items()})
    return found.log_softmax(-1).numpy()


def frozen(folder: Path, config: RunConfig, weights: Mapping[str, np.ndarray]) -> FrozenModel:
    return FrozenModel("the reference", config, "digest", lambda: weights, folder)


def rows_of(model: FrozenModel, samples: Samples, kind: OutputKind) -> np.ndarray:
    """The rows of all samples, the last sample first."""
    with model.outputs(samples, kind) as file:
        assert file.all_rows_on_disk
        return file.rows(np.arange(len(samples))[::-1])


SPLITS = [
    ("gptj", 2, 2, 2, 2),
    *(slow("gptj", 1, 1, micro, 1) for micro in (1, 2, 8)),
    *(slow("gptj", 2, 1, 2, 3), slow("t5", 1, 2, 1, 1), slow("t5", 2, 2, 2, 1)),
    ("t5", 2, 2, 2, 2),
]


@pytest.mark.parametrize(("family", "dp", "tp", "micro", "places"), SPLITS)
def test_log_probabilities_of_tokens_are_those_of_transformers(
    family: str, dp: int, tp: int, micro: int, places: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """With the logits in slices of the tokens, at positions of the samples that a batch has."""
    length = 4 if family == "gptj" else 1
    monkeypatch.setattr(
        LMHeadLoss, "_num_chunks", lambda self, x: self.layout.sequence_length(x) // length
    )
    config, samples, hf = case(family, dp, tp, micro, places)
    weights, expected = logical(hf), their_logits(family, hf, samples)
    model = frozen(tmp_path, config, weights)
    with model.outputs(samples, token_logps_kind("ref_logps")) as file:
        batch = SamplesWithTokenOutputs(samples, file).take(np.arange(len(samples)))
        labels, logps = batch["labels"], batch["ref_logps"]
        in_loss = labels != IGNORE_INDEX
        (again,) = (SamplesWithTokenOutputs(samples, file).take([2])["ref_logps"][:1],)
    assert logps.shape == labels.shape
    assert not logps[~in_loss].any()
    of_label = np.take_along_axis(expected, labels[in_loss][:, None].astype(np.int64), 1)[:, 0]
    np.testing.assert_allclose(logps[in_loss], of_label, rtol=1e-4, atol=1e-5)
    each = len(labels) // len(samples)
    np.testing.assert_array_equal(again, logps[2 * each : 2 * each + 1])


@pytest.mark.parametrize(
    ("family", "dp", "tp", "micro", "k", "temperature"),
    [
        ("gptj", 2, 2, 2, 40, 2.0),  # more than the 30 tokens of a device
        *(slow("gptj", 1, 1, micro, 5, 1.0) for micro in (1, 2, 8)),
        *(slow("gptj", 1, 2, 2, 9, 0.5), slow("gptj", 1, 1, 2, 55, 1.0)),
        *(slow("t5", 2, 2, 2, 7, 3.0), slow("t5", 1, 1, 4, 1, 1.0)),
    ],
)
def test_a_teachers_likeliest_tokens_are_those_of_transformers(
    family: str, dp: int, tp: int, micro: int, k: int, temperature: float, tmp_path: Path
) -> None:
    """The student has fewer tokens, which none of the teacher's others replaces."""
    config, samples, hf = case(family, dp, tp, micro, 2)
    size = 55
    kind = top_tokens_kind(k, temperature, size)
    with frozen(tmp_path, config, logical(hf)).outputs(samples, kind) as file:
        rows = file.rows(np.arange(len(samples)))
    logps = torch.tensor(their_logits(family, hf, samples))[:, :size].log_softmax(-1)
    ids, found = torch.tensor(np.array(rows["teacher_ids"])).long(), rows["teacher_logps"]
    assert rows.dtype.itemsize == 6 * k + 4
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all(), "all are different"
    np.testing.assert_allclose(logps.gather(1, ids), logps.topk(k).values, atol=1e-4)
    np.testing.assert_allclose(found, logps.gather(1, ids), rtol=1e-3, atol=1e-4)
    rest = (logps / temperature).scatter(1, ids, -torch.inf).logsumexp(-1)
    if k < size:
        np.testing.assert_allclose(rows["teacher_rest"], rest, rtol=1e-4, atol=1e-4)
    else:
        assert (rows["teacher_rest"] < -80).all()


def test_what_is_computed_is_read_afterwards(tmp_path: Path) -> None:
    """By the names of other arrays, too; other samples or weights have files of their own."""
    config, samples, hf = case("gptj", 1, 1, 4, 2)
    first = rows_of(frozen(tmp_path, config, logical(hf)), samples, token_logps_kind("a"))["a"]
    (file,) = tmp_path.iterdir()
    without_weights = frozen(tmp_path, config, {})
    again = rows_of(without_weights, samples, token_logps_kind("b"))["b"]
    np.testing.assert_array_equal(first, again)
    moved = replace(without_weights, folder=tmp_path / "resumed", previous_folder=tmp_path)
    np.testing.assert_array_equal(rows_of(moved, samples, token_logps_kind("a"))["a"], first)
    assert (tmp_path / "resumed" / file.name).read_bytes() == file.read_bytes()
    other = replace(frozen(tmp_path, config, logical(hf)), sha256="other")
    rows_of(other, samples, token_logps_kind("a"))
    assert len([*tmp_path.glob("*.rows")]) == 2
