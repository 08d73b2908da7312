"""Phased fine-tuning of FLAN-T5 and GPT-J with dropout, against Hugging Face's models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import popxl
from tests.programs import gptj

TOLERANCES = {popxl.float32: (1e-4, 1e-6), popxl.float16: (2e-2, 2e-3)}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda d: d.name)


class Masked(torch.nn.Module):
    """Dropout whose masks are given, one for each call."""

    def __init__(self, masks: np.ndarray):
        super().__init__()
        self.masks = iter(torch.tensor(masks.astype(np.float32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.masks)


def check_step(model, hf, losses, weights, loss_of) -> None:
    """Compare with a step of gradient descent in torch.

    Args:
        loss_of: the loss of a micro-batch, by its number.
    """
    c = model.config
    rtol, atol = TOLERANCES[c.dtype]
    before = model.weights(hf)
    sgd = torch.optim.SGD(hf.parameters(), c.lr)
    for i in range(c.micro_batches):
        loss = loss_of(i)
        np.testing.assert_allclose(losses[i], loss.item(), rtol=rtol)
        (loss / c.micro_batches).backward()
    sgd.step()
    for t, wanted in model.weights(hf).items():
        assert weights[t].dtype == c.dtype.as_numpy()
        change = weights[t].astype(np.float32) - before[t]
        np.testing.assert_allclose(change, wanted - before[t], rtol, atol, err_msg=t.id)


@DTYPES
def test_gptj_is_hugging_faces(dtype) -> None:
    c = replace(gptj.Config(), dtype=dtype)
    torch.manual_seed(0)
    hf = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(
            vocab_size=c.vocab, n_positions=c.length, n_embd=c.hidden, n_layer=c.layers,
            n_head=c.heads, rotary_dim=c.rotary, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0, initializer_range=0.2,
        )
    )  # fmt: skip
    rng = np.random.default_rng(0)
    words, labels = rng.integers(0, c.vocab, (2, c.micro_batches, c.batch, c.length), np.int32)
    model = gptj.FineTuning(c)
    for accumulators in (p.grad_facts.accum for p in (model.blocks, model.head)):
        assert {f.dtype for f in accumulators.values_flat()} == {dtype}
    losses, masks, weights = model.run(hf, words, labels)
    assert 0.15 < np.mean(np.array(masks) == 0) < 0.35
    for block, (first, second) in zip(hf.transformer.h, masks, strict=True):
        block.attn.resid_dropout, block.mlp.dropout = Masked(first), Masked(second)

    def loss_of(i: int) -> torch.Tensor:
        logits = hf(torch.tensor(words[i]).long()).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.tensor(labels[i]).long().flatten()
        )

    check_step(model, hf, losses, weights, loss_of)
