"""The loss without training: that of Hugging Face's model over all samples, in any layout."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from data.causal_lm import PackedSequences, TokenStream
from data.seq2seq import EncodedExamples, shift_right
from modelling.objectives import CrossEntropy
from sessions.loss_evaluation import LossSession
from tests.modelling.gptj import hf as gptj
from tests.modelling.harness import small_config
from tests.modelling.t5 import hf as t5
from tests.modelling.torch_training import logical
from tests.slow import slow

SAMPLES = 21  # no multiple of any batch


def t5_case(dp: int, tp: int):
    data = small_config(tp).to_dict()
    data["execution"] |= {"data_parallel": dp, "micro_batch_size": 2, "device": "cpu"}
    data["training"]["global_batch_size"] = 4 * dp
    config = type(small_config(tp)).from_dict(data)
    model, rng = config.model, np.random.default_rng(0)
    lengths = rng.integers(1, model.sequence_length, SAMPLES, endpoint=True)
    tokens = rng.integers(2, model.embedding.vocab_size, lengths.sum(), np.int32)
    shape = (SAMPLES, model.decoder_sequence_length)
    targets = rng.integers(2, model.embedding.vocab_size, shape, np.int32)
    targets[np.arange(shape[1]) >= rng.integers(1, shape[1], (SAMPLES, 1), endpoint=True)] = -100
    starts = np.cumsum([0, *lengths])
    samples = EncodedExamples(tokens, starts, targets, model.sequence_length, 0)
    hf, total = t5.hf_model(config), 0.0
    for i in range(SAMPLES):
        label = torch.tensor(targets[i][targets[i] >= 0][None]).long()
        with torch.no_grad():
            encoded = hf.encoder(torch.tensor(samples.prompt_ids(i)[None]).long()).last_hidden_state
            read = torch.tensor(shift_right(label.numpy(), 0))
            hidden = hf.decoder(input_ids=read, encoder_hidden_states=encoded).last_hidden_state
            logits = hf.lm_head(hidden)  # their forward would scale, as for a tied head
        total += torch.nn.functional.cross_entropy(logits[0], label[0], reduction="sum").item()
    weights = {name: p.detach().numpy() for name, p in hf.named_parameters()}
    return config, weights, samples, total, np.count_nonzero(targets >= 0)


def gptj_case(dp: int, tp: int):
    config = gptj.small_config(dp, tp, 2)
    model, rng = config.model, np.random.default_rng(0)
    lengths = rng.integers(2, model.sequence_length + 1, SAMPLES, endpoint=True)
    tokens = rng.integers(3, model.embedding.vocab_size, lengths.sum(), np.int32)
    starts = np.cumsum([0, *lengths])
    stream = TokenStream(tokens, tokens, starts)
    samples = PackedSequences.from_stream(stream, model.sequence_length, model.pad_token_id)
    hf, total = gptj.hf_model(config), 0.0
    for start, end in pairwise(starts):
        ids = torch.tensor(tokens[start:end][None]).long()
        with torch.no_grad():
            logits = hf(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    return config, logical(hf), samples, total, int((lengths - 1).sum())


@pytest.mark.parametrize(
    ("case", "dp", "tp"),
    [
        *((t5_case, 2, 2), (gptj_case, 1, 1)),
        *(slow(*c) for c in ((t5_case, 1, 1), (gptj_case, 2, 2))),
    ],
)
def test_the_loss_is_hugging_faces(case, dp, tp):
    config, weights, samples, total, tokens = case(dp, tp)
    done: list[int] = []
    with LossSession(config) as model:
        model.write(weights)
        loss = model.compute(samples, done.append)
    assert (loss.tokens, sum(done)) == (tokens, SAMPLES)
    np.testing.assert_allclose(loss.total, total, rtol=1e-5)
    assert CrossEntropy.metrics["perplexity"](loss.metric_sums) == pytest.approx(
        np.exp(total / tokens), rel=1e-4
    )
