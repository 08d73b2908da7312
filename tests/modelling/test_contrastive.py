"""The contrastive objective against torch on transformers' models, and sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import T5EncoderModel

import popxl
import popxl_addons as addons
from config.errors import ConfigError
from data.samples import Batch
from data.text_samples import make_text_samples
from data.token_sequences import TokenSequences
from modelling.layers import batch_loss
from modelling.objectives import make_objective
from popxl import ops
from tests.modelling.gptj import hf as gptj
from tests.modelling.llama import hf as llama
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.t5 import training as t5
from tests.modelling.torch_training import check_training, logical, train
from tests.modelling.weight_maps import base_weight_map as llama_weight_map
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # other objectives have most of the programs

STEPS, RATE = 3, 1e-2


def contrastive(config: Any, batch: int = 8, places: int = 1, **settings: Any) -> Any:
    """A configuration that trains embeddings, with up to `places` rows in a sample."""
    training = replace(
        config.training, objective="contrastive", global_batch_size=batch, **settings
    )
    packing = {"packing": False} if hasattr(config.data, "packing") else {}
    data = replace(config.data, examples_per_sample=places, **packing)
    return replace(config, training=training, data=data)


# ---- the loss of vectors ------------------------------------------------------------------------
def info_nce(vectors: list[torch.Tensor], symmetric: bool, scale: float) -> torch.Tensor:
    """The mean loss of anchors, positives and negatives, [rows, hidden] each."""
    anchors, *documents = (torch.nn.functional.normalize(x, dim=-1) for x in vectors)
    labels = torch.arange(len(anchors))
    scores = scale * anchors @ torch.cat(documents).T
    loss = torch.nn.functional.cross_entropy(scores, labels)
    if symmetric:
        back = torch.nn.functional.cross_entropy(scores[:, : len(anchors)].T, labels)
        loss = (loss + back) / 2
    return loss


@pytest.mark.slow
def test_info_nce_is_that_of_sentence_transformers() -> None:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    vectors = [torch.randn(5, 8, dtype=torch.float64) for _ in range(4)]
    plain = MultipleNegativesRankingLoss(None)  # its own scale
    both = MultipleNegativesRankingLoss(
        None, 7.0, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    )
    for theirs, symmetric, scale in ((plain, False, 20.0), (both, True, 7.0)):
        expected = theirs.compute_loss_from_embeddings(vectors, None).item()
        assert info_nce(vectors, symmetric, scale).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize("symmetric", [False, True])
def test_loss_and_gradient_of_vectors(symmetric: bool, negatives: int) -> None:
    """Of five rows; a sixth place is empty."""
    settings: dict[str, Any] = {"symmetric": symmetric, "negatives": negatives, "scale": 7.0}
    objective = make_objective(contrastive(gptj.small_config(), **settings))
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((6, 2 + negatives, 8), np.float32)
    vectors[5] = 0

    def loss(own: popxl.Tensor) -> popxl.Tensor:
        return objective.loss(objective.loss_stats(own, {}, None, None), {}, None)

    ir = popxl.Ir()
    with ir.main_graph:
        own = popxl.variable(vectors.reshape(-1, 8))
        graph = ir.create_graph(loss, own.spec)
        gradient = popxl.transforms.autodiff(graph, grads_required=graph.inputs)
        info = ops.call_with_info(graph, own)
        one = popxl.constant(1.0, popxl.float32)
        (slope,) = ops.call(gradient.graph, one, inputs_dict=gradient.inputs_dict(info))
        streams = [addons.host_store(t) for t in (info.outputs[0], slope)]
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    leaf = torch.tensor(vectors[:5].astype(np.float64), requires_grad=True)
    expected = info_nce([*leaf.unbind(1)], symmetric, 7.0) * 5
    expected.backward()
    assert float(found[streams[0]]) == pytest.approx(expected.item(), rel=1e-5)
    slopes = found[streams[1]].reshape(vectors.shape)
    np.testing.assert_allclose(slopes[:5], leaf.grad, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(slopes[5], 0)


# ---- training -----------------------------------------------------------------------------------
def random_samples(config: Any, rows: int, vocabulary: int, longest: int) -> TokenSequences:
    """Rows of random texts, some of which have fewer negatives."""
    negatives = config.training.negatives
    rng, texts = np.random.default_rng(3), list[np.ndarray]()
    for row in range(rows):
        for place in range(2 + negatives):
            count = 0 if place > 1 + row % (negatives + 1) else rng.integers(1, longest + 1)
            texts.append(rng.integers(3, vocabulary, count, np.int32))
    tokenizer: Any = SimpleNamespace(pad_token_id=2, eos_token_id=1, affix_ids=((), ()))
    return make_text_samples(texts, 2 + negatives, config, tokenizer)


def texts_of(batch: Mapping[str, torch.Tensor], config: Any) -> list[list[torch.Tensor]]:
    """The tokens of a batch's anchors, positives and negatives; those that are there."""
    count = config.training.texts_per_row
    columns: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for input_ids, numbers in zip(batch["input_ids"], batch["segment_ids"], strict=True):
        for place in range(config.data.examples_per_sample * count):
            own = numbers == place + 1
            if own.any():
                columns[place % count].append(input_ids[own])
    return [column for column in columns if column]


def pooled(model: Any, text: torch.Tensor, config: Any) -> torch.Tensor:
    """The vector of a text."""
    hidden: torch.Tensor = model(input_ids=text[None]).last_hidden_state[0]
    return hidden.mean(0) if config.training.pooling == "mean" else hidden[-1]


def vectors_of(model: Any, batch: Mapping[str, torch.Tensor], config: Any) -> list[torch.Tensor]:
    """The pooled vectors of `texts_of`."""
    return [
        torch.stack([pooled(model, text, config) for text in column])
        for column in texts_of(batch, config)
    ]


class Case(NamedTuple):
    """A configuration, transformers' model, and functions that give each the names of the other."""

    config: Any
    theirs: Any
    weights: Callable[[Any], Batch]
    named: Callable[[Batch], Batch]


def whole_batch_loss(model: Any, batch: dict[str, torch.Tensor], config: Any) -> torch.Tensor:
    """The loss of all rows of a batch at once."""
    training = config.training
    return info_nce(vectors_of(model, batch, config), training.symmetric, training.scale)


def check(
    case: Case, vocabulary: int, longest: int = 4, loss_of: Callable[..., Any] = whole_batch_loss
) -> None:
    """Three steps of AdamW are torch's in float64."""
    config, training = case.config, case.config.training
    size = training.global_batch_size
    rows = size * STEPS * config.data.examples_per_sample
    samples = random_samples(config, rows, vocabulary, longest)
    assert len(samples) >= size * STEPS
    batches = [samples.take(np.arange(i * size, (i + 1) * size)) for i in range(STEPS)]

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        value: torch.Tensor = loss_of(case.theirs, batch, config)
        return value

    model = case.theirs.double()
    start = case.weights(model)
    expected = train(model, batches, loss, RATE)
    session = fine_tuning(config, gradients=True)
    session.write(start)
    check_training(session, batches, expected, RATE, case.named)


def without_prefix(prefix: str, tensors: Batch) -> Batch:
    return {name.removeprefix(prefix): x for name, x in tensors.items()}


def with_prefix(prefix: str, model: torch.nn.Module) -> Batch:
    return {f"{prefix}{name}": x for name, x in logical(model).items()}


def gptj_case(dp: int, tp: int, micro: int, places: int, **settings: Any) -> Case:
    config = gptj.small_config(dp, tp, micro, sequence_length=24 * places)
    theirs, path = gptj.hf_model(gptj.small_config()).transformer, "transformer."
    names = partial(with_prefix, path), partial(without_prefix, path)
    return Case(contrastive(config, 8, places, **settings), theirs, *names)


def llama_case(kind: str, dp: int, tp: int, micro: int, places: int, **settings: Any) -> Case:
    hf = llama.hf_config(kind, max_position_embeddings=64, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4})  # fmt: skip
    config = llama.our_config(hf, dp, tp, micro, sequence_length=24 * places)
    config = contrastive(config, 8, places, **settings)
    weight_map = llama_weight_map(config)

    def weights(model: Any) -> Batch:
        return weight_map.from_hf(with_prefix("model.", model))

    def named(ours: Batch) -> Batch:
        return without_prefix("model.", dict(weight_map.to_hf(ours)))

    return Case(config, llama.hf_model(hf).model, weights, named)


@pytest.mark.parametrize(
    ("dp", "tp", "micro", "places"),
    [
        slow(1, 1, 8, 1),
        slow(1, 1, 1, 1),
        slow(1, 1, 2, 3),
        slow(2, 1, 1, 2),
        slow(1, 2, 2, 1),
        (2, 2, 2, 2),
        slow(4, 1, 2, 1),
    ],
)
def test_gptj_learns_as_torch_does(
    dp: int, tp: int, micro: int, places: int, monkeypatch: Any
) -> None:
    """With rows in samples of their own and packed, with and without negatives.

    Some with the scores of two rows at a time, as of batches whose scores take more than 1 GiB.
    """
    chunks: list[int] = []

    def few_rows(rows: int, nbytes: int) -> int:
        chunks.append(rows // 2)
        return chunks[-1]

    if dp == 2:
        monkeypatch.setattr(batch_loss, "_num_chunks", few_rows)
    pooling = "last" if tp == 2 else "mean"
    settings: Any = {"negatives": places - 1, "symmetric": dp == 2, "scale": 9.0}
    case = gptj_case(dp, tp, micro, places, pooling=pooling, **settings)
    check(case._replace(config=transposed(case.config, tp == 2)), gptj.VOCABULARY)
    assert all(count > 1 for count in chunks)
    assert bool(chunks) == (dp == 2)


def test_the_scores_of_a_chunk_are_within_a_limit(monkeypatch: Any) -> None:
    """By the smallest divisor of the rows; a row's own scores are not split."""
    monkeypatch.setattr(batch_loss, "MAX_SCORE_BYTES", 1000)
    assert [batch_loss._num_chunks(12, n) for n in (999, 1001, 3500, 4001)] == [1, 2, 4, 6]
    assert batch_loss._num_chunks(12, 10**9) == 12


def grad_cache_loss(model: Any, batch: dict[str, torch.Tensor], config: Any) -> torch.Tensor:
    """The loss of sentence-transformers' GradCache, which embeds two texts at a time."""
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

    class Embedder(torch.nn.Module):
        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            pairs = zip(features["input_ids"], features["attention_mask"], strict=True)
            vectors = [pooled(model, ids[own.bool()], config) for ids, own in pairs]
            return {"sentence_embedding": torch.stack(vectors)}

    features = []
    for column in texts_of(batch, config):
        ids = torch.nn.utils.rnn.pad_sequence(column, batch_first=True)
        there = [torch.ones_like(text) for text in column]
        mask = torch.nn.utils.rnn.pad_sequence(there, batch_first=True)
        features.append({"input_ids": ids, "attention_mask": mask})
    scale, embedder = config.training.scale, torch.nn.Sequential(Embedder())
    loss = losses.CachedMultipleNegativesRankingLoss(embedder, scale, mini_batch_size=2)
    value: torch.Tensor = loss(features, None)
    return value


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp", "micro"), [(2, 2, 1), (1, 1, 2)])
def test_gptj_learns_as_with_grad_cache(dp: int, tp: int, micro: int) -> None:
    """Which embeds each text twice for what one forward pass has here."""
    check(gptj_case(dp, tp, micro, 1, scale=9.0), gptj.VOCABULARY, loss_of=grad_cache_loss)


@pytest.mark.parametrize("kind", [slow("qwen3"), slow("llama")])
def test_llama_shaped_models_do(kind: str) -> None:
    check(llama_case(kind, 2, 2, 1, 2, negatives=1), llama.VOCABULARY)


@pytest.mark.parametrize(
    ("dp", "tp", "micro", "places", "pooling"),
    [
        (2, 1, 1, 2, "mean"),
        slow(1, 1, 8, 1, "last"),
        slow(1, 2, 2, 1, "mean"),
        slow(2, 2, 2, 3, "mean"),
    ],
)
def test_the_encoder_of_t5_does(dp: int, tp: int, micro: int, places: int, pooling: str) -> None:
    layers = tp  # one by default, and two in slow cases
    config = t5.our_config(dp, tp, micro, layers=layers)
    config = replace(config, model=replace(config.model, sequence_length=24 * places))
    config = contrastive(config, 8, places, negatives=1, pooling=pooling)
    whole = t5.their_model(layers)
    theirs = T5EncoderModel(whole.config).eval()
    theirs.load_state_dict(whole.state_dict(), strict=False)
    check(Case(transposed(config, dp == 2), theirs, logical, dict), t5.VOCABULARY)


@pytest.mark.parametrize("kind", [slow("gptj"), slow("qwen3"), "mistral"])
def test_attention_to_later_tokens(kind: str) -> None:
    """As transformers with is_causal false, with a sliding window or without."""
    split: Any = (1, 2, 2, 2)
    settings: Any = {"negatives": 1, "bidirectional": True}
    case = gptj_case(*split, **settings) if kind == "gptj" else llama_case(kind, *split, **settings)
    case.theirs.config.is_causal = False
    check(case, gptj.VOCABULARY, longest=8)


def test_what_the_objective_does_not_do_is_refused() -> None:
    """A pass of some micro-batches, balanced experts, and an encoder that is bidirectional."""
    config = contrastive(gptj.small_config(micro_batch=2), 8)
    assert config.micro_batches_per_pass == 4
    with pytest.raises(ConfigError, match="a pass has all its 4 micro-batches, but execution.micr"):
        config.with_values({"execution.micro_batches_per_pass": 2})
    config = llama.our_config(llama.hf_config("qwen3_moe"), 1, 1, 2)
    config = config.with_values({"model.router_aux_loss_coef": 0.1})
    with pytest.raises(ConfigError, match="contrastive does not balance experts: leave out model"):
        contrastive(config)
    with pytest.raises(ConfigError, match="training.bidirectional is for decoder-only models"):
        contrastive(t5.our_config(), bidirectional=True)
    with pytest.raises(ConfigError, match="training.scale is for contrastive, not for dpo"):
        config.with_values({"training.objective": "dpo", "training.scale": 2.0})
