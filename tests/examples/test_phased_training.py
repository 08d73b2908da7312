"""Phased fine-tuning of FLAN-T5 and GPT-J with dropout, compared with Hugging Face."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import popxl
from examples import flan_t5, gptj

TOLERANCES = {popxl.float32: (1e-4, 1e-6), popxl.float16: (2e-2, 2e-3)}


def dtypes(quick: popxl.dtype):
    """Returns both dtypes as parameters; the one that is not `quick` is marked slow."""
    return pytest.mark.parametrize(
        "dtype",
        [pytest.param(d, marks=() if d is quick else pytest.mark.slow) for d in TOLERANCES],
        ids=lambda d: d.name,
    )


class Masked(torch.nn.Module):
    """Dropout with given masks, one for each call."""

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


@dtypes(popxl.float16)
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
    model = gptj.TrainingSession(c)
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


@dtypes(popxl.float32)
def test_flan_t5_is_hugging_faces(dtype) -> None:
    c = replace(flan_t5.Config(), dtype=dtype)
    torch.manual_seed(0)
    hf = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=c.vocab, d_model=c.hidden, d_kv=c.hidden // c.heads, d_ff=c.ff,
            num_layers=c.layers, num_heads=c.heads, relative_attention_num_buckets=c.buckets,
            relative_attention_max_distance=16, feed_forward_proj="gated-gelu", dropout_rate=0.0,
            tie_word_embeddings=False, decoder_start_token_id=0, layer_norm_epsilon=c.eps,
            initializer_factor=0.3,
        )
    )  # fmt: skip
    # FLAN-T5's head is its own, but this class ties it all the same.
    hf.lm_head.weight = torch.nn.Parameter(hf.lm_head.weight.detach().clone())
    buckets = [
        attention._relative_position_bucket(
            torch.arange(n)[None] - torch.arange(n)[:, None], two_ways, c.buckets, 16
        ).numpy()
        for attention, n, two_ways in (
            (hf.encoder.block[0].layer[0].SelfAttention, c.length, True),
            (hf.decoder.block[0].layer[0].SelfAttention, c.target_length, False),
        )
    ]
    rng = np.random.default_rng(0)
    words, labels = (
        rng.integers(1, c.vocab, (c.micro_batches, c.batch, n), np.int32)
        for n in (c.length, c.target_length)
    )
    targets = np.concatenate([0 * labels[..., :1], labels[..., :-1]], -1)
    model = flan_t5.TrainingSession(c, tuple(buckets))
    for phase in (model.encoder, model.decoder, model.words):
        assert {f.dtype for f in phase.grad_facts.accum.values_flat()} == {dtype}
        assert set(phase.bwd.graph.inputs[1:]) == set(phase.bwd.args.tensors)
    losses, masks, weights = model.run(hf, words, targets, labels)
    for stack, kept in zip((hf.encoder, hf.decoder), masks, strict=True):
        for block, layers in zip(stack.block, kept, strict=True):
            for layer, mask in zip(block.layer, layers, strict=True):
                layer.dropout = Masked(mask)
    check_step(
        model, hf, losses, weights,
        lambda i: hf(torch.tensor(words[i]).long(), labels=torch.tensor(labels[i]).long()).loss,
    )  # fmt: skip
