"""Examples of language models, compared with Hugging Face."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from examples import bert_squad, bert_tied, bloom, gpt_2d, gptj_int4, llama


def test_bert_fine_tuned_by_phases_is_hugging_faces() -> None:
    c = bert_squad.Config()
    hf = bert(transformers.BertForQuestionAnswering, c)
    rng = np.random.default_rng(0)
    shape = (c.micro_batches, c.replicas, c.batch)
    steps = []
    for _ in range(2):
        length = rng.integers(3, c.sequence + 1, shape)
        steps.append(
            {
                "words": rng.integers(0, c.vocab, (*shape, c.sequence)),
                "token_type": rng.integers(0, 2, (*shape, c.sequence)),
                "mask": np.arange(c.sequence) < length[..., None],
                "start": rng.integers(0, c.sequence, shape),
                "end": rng.integers(0, c.sequence, shape),
            }
        )
    steps = [{n: a.astype(np.int32) for n, a in s.items()} for s in steps]
    model = bert_squad.SquadModel(c)
    losses, weights = model.fine_tune(hf, steps)
    sgd = torch.optim.SGD(hf.parameters(), c.lr)
    for step, found in zip(steps, losses, strict=True):
        sgd.zero_grad()
        for i in np.ndindex(shape[:2]):
            t = {n: torch.tensor(a[i]).long() for n, a in step.items()}
            loss = hf(
                t["words"], t["mask"], t["token_type"],
                start_positions=t["start"], end_positions=t["end"],
            ).loss  # fmt: skip
            (loss / (shape[0] * shape[1])).backward()
            np.testing.assert_allclose(found[i], loss.item(), rtol=1e-4)
        sgd.step()
    for t, expected in model.weights(hf).items():
        np.testing.assert_allclose(weights[t], expected, rtol=1e-3, atol=1e-5, err_msg=t.id)


def bert(cls, c):
    torch.manual_seed(0)
    return cls(
        transformers.BertConfig(
            vocab_size=c.vocab, hidden_size=c.hidden, num_hidden_layers=c.layers,
            num_attention_heads=c.heads, intermediate_size=4 * c.hidden,
            max_position_embeddings=c.sequence, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, hidden_act="gelu_new", pad_token_id=None,
        )
    )  # fmt: skip


def test_bert_with_a_tied_head_is_hugging_faces() -> None:
    c, masked = bert_squad.Config(), 3
    hf = bert(transformers.BertForMaskedLM, c)
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(2):
        positions = np.stack([rng.permutation(c.sequence)[:masked] for _ in range(c.batch)])
        batches.append(
            {
                "words": rng.integers(0, c.vocab, (c.batch, c.sequence)),
                "token_type": rng.integers(0, 2, (c.batch, c.sequence)),
                "mask": np.arange(c.sequence) < np.array([[c.sequence], [4]]),
                "positions": positions,
                "labels": np.where(
                    rng.random((c.batch, masked)) < 0.3,
                    -1,
                    rng.integers(0, c.vocab, (c.batch, masked)),
                ),
            }
        )
    batches = [{n: a.astype(np.int32) for n, a in b.items()} for b in batches]
    model = bert_tied.MaskedLM(c, masked)
    losses, weights = model.train(model.weights(hf), batches)
    sgd = torch.optim.SGD(hf.parameters(), c.lr)
    for batch, found in zip(batches, losses, strict=True):
        labels = np.full((c.batch, c.sequence), -100)
        np.put_along_axis(
            labels, batch["positions"], np.where(batch["labels"] < 0, -100, batch["labels"]), 1
        )
        t = {n: torch.tensor(batch[n]).long() for n in ("words", "mask", "token_type")}
        loss = hf(t["words"], t["mask"], t["token_type"], labels=torch.tensor(labels)).loss
        np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    for t, expected in model.weights(hf).items():
        np.testing.assert_allclose(weights[t], expected, rtol=1e-3, atol=1e-5, err_msg=t.id)


def test_gpt_cut_in_two_dimensions_is_hugging_faces() -> None:
    c = gpt_2d.Config()
    torch.manual_seed(0)
    hf = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=c.vocab, n_positions=c.sequence, n_embd=c.hidden, n_layer=c.layers,
            n_head=c.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    for p in hf.parameters():
        torch.nn.init.normal_(p, std=0.3)
    words = np.random.default_rng(2).integers(0, c.vocab, (c.batch, c.sequence + 1))
    program = gpt_2d.Program(c)
    losses, grads, _ = program.run(hf, words[:, :-1], words[:, 1:])
    logits = hf(torch.tensor(words[:, :-1])).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, c.vocab), torch.tensor(words[:, 1:]).flatten()
    )
    loss.backward()
    np.testing.assert_allclose(losses, loss.item(), rtol=1e-5)
    for p in hf.parameters():
        p.data = p.grad
    expected = program.weights(hf)
    del grads["padding"], expected["padding"]
    assert grads.keys() == expected.keys()
    for name, gradient in grads.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)


def randomised(model: torch.nn.Module, std: float = 0.3) -> torch.nn.Module:
    """Randomize all parameters, so that no bias is zero and no scale is one."""
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model.eval()


def test_bloom_cut_over_replicas_is_hugging_faces() -> None:
    c = bloom.Config()
    hf = randomised(
        transformers.BloomForCausalLM(
            transformers.BloomConfig(
                vocab_size=c.vocab, hidden_size=c.hidden, n_layer=c.layers, n_head=c.heads,
                hidden_dropout=0.0, attention_dropout=0.0,
            )
        )
    )  # fmt: skip
    words = np.random.default_rng(3).integers(0, c.vocab, (c.batch, c.sequence))
    lengths = np.array([c.sequence, 3])
    found = bloom.Bloom(c).next_logits(hf, words, lengths)
    with torch.no_grad():
        expected = [
            hf(torch.tensor(w[None, :n])).logits[0, -1].numpy()
            for w, n in zip(words, lengths, strict=True)
        ]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_llama_generates_what_hugging_face_does() -> None:
    c = llama.Config()
    hf = randomised(
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=c.vocab, hidden_size=c.hidden, num_hidden_layers=c.layers,
                num_attention_heads=c.heads, intermediate_size=c.intermediate,
                max_position_embeddings=c.length, rms_norm_eps=c.eps, pad_token_id=0,
                eos_token_id=None, bos_token_id=None,
            )
        )
    )  # fmt: skip
    prompts = np.random.default_rng(4).integers(1, c.vocab, (c.batch, c.prompt))
    found = llama.Generator(c).generate(hf, prompts)
    expected = hf.generate(torch.tensor(prompts), max_new_tokens=c.new, do_sample=False)
    np.testing.assert_array_equal(found, expected.numpy())
    assert len({tuple(row) for row in found[:, c.prompt :]}) == c.batch


def test_gpt_j_in_four_bits_is_hugging_faces_with_rounded_weights() -> None:
    c = gptj_int4.Config()
    hf = randomised(
        transformers.GPTJForCausalLM(
            transformers.GPTJConfig(
                vocab_size=c.vocab, n_embd=c.hidden, n_layer=c.layers, n_head=c.heads,
                rotary_dim=c.rotary_dim, n_positions=c.sequence,
            )
        )
    )  # fmt: skip
    words = np.random.default_rng(5).integers(0, c.vocab, (c.batch, c.sequence))
    found = gptj_int4.GPTJ(c).run(hf, words)
    with torch.no_grad():
        whole = hf(torch.tensor(words)).logits.numpy()
        for name, p in hf.named_parameters():
            if ".h." in name and p.ndim == 2:
                p.copy_(torch.tensor(gptj_int4.round_to_int4(p.numpy().T, c.group_size).T))
        expected = hf(torch.tensor(words)).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    assert np.abs(whole - expected).max() > 0.1
