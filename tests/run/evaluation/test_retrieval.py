"""Retrieval: metrics against sentence-transformers, and the documents that anchors are to find."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.contrastive_rows import read_corpus_document
from data.prompt_template import ColumnError, Template
from data.token_sequences import TokenSequences
from run.evaluation import retrieval
from run.evaluation.retrieval import embed, retrieval_metrics


def random_unit_vectors(seed: int, count: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_metrics_of_known_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first query finds its document second, the other its two first and third."""
    monkeypatch.setattr(retrieval, "BLOCK_SCORES", 1)  # a query at a time
    documents = np.eye(3, dtype=np.float32)
    queries = np.asarray([[0.9, 0.4, 0.1], [0.8, 0.5, 0.1]], np.float32)
    found = retrieval_metrics(queries, documents, [frozenset([1]), frozenset([0, 2])])
    first, other = 1 / np.log2(3), (1 + 1 / np.log2(4)) / (1 + 1 / np.log2(3))
    assert found == pytest.approx(
        {"recall@1": 0.25, "recall@5": 1.0, "recall@10": 1.0, "ndcg@10": (first + other) / 2}
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_documents", [5, 60])
def test_metrics_are_those_of_sentence_transformers(num_documents: int) -> None:
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.util import cos_sim

    queries, documents = random_unit_vectors(0, 40), random_unit_vectors(1, num_documents)
    rng, count = np.random.default_rng(2), min(num_documents, 12)
    relevant = [
        frozenset(rng.choice(num_documents, rng.integers(1, count), replace=False).tolist())
        for _ in queries
    ]

    def encode(vectors: np.ndarray) -> Any:
        return lambda texts, **_: vectors[[int(text) for text in texts]]

    model: Any = SimpleNamespace(
        encode_query=encode(queries),
        encode_document=encode(documents),
        model_card_data=SimpleNamespace(set_evaluation_metrics=lambda *_: None),
    )
    evaluator = InformationRetrievalEvaluator(
        {f"q{i}": str(i) for i in range(len(queries))},
        {f"d{i}": str(i) for i in range(num_documents)},
        {f"q{i}": {f"d{j}" for j in found} for i, found in enumerate(relevant)},
        precision_recall_at_k=[1, 5, 10],
        score_functions={"cosine": cos_sim},
    )
    theirs = evaluator.compute_metrices(model)["cosine"]
    expected = {f"recall@{k}": value for k, value in theirs["recall@k"].items()}
    expected["ndcg@10"] = theirs["ndcg@k"][10]
    assert retrieval_metrics(queries, documents, relevant) == pytest.approx(expected)


def test_vectors_are_put_back_in_the_order_of_the_texts() -> None:
    slots = np.asarray([[2, 0], [1, -1]])
    texts = [np.zeros(1, np.int32)] * 3
    samples = TokenSequences(texts, slots, 4, 0, 0, "mean")
    by_sample = np.arange(4, dtype=np.float32).reshape(2, 2, 1)
    session: Any = SimpleNamespace(
        loss_stats=lambda _: iter([(slice(0, 1), by_sample[:1]), (slice(1, 2), by_sample[1:])])
    )
    np.testing.assert_array_equal(embed(session, samples), [[1], [2], [0]])


def test_documents_have_the_column_of_the_positive_or_a_text() -> None:
    passage = Template("passage: {d}")
    assert read_corpus_document({"positive": "a", "text": "b"}, None) == "a"
    assert read_corpus_document({"text": "b"}, None) == "b"
    assert read_corpus_document({"d": "a"}, passage) == "passage: a"
    assert read_corpus_document({"text": "b"}, passage) == "passage: b"
    with pytest.raises(ColumnError, match="there is no column 'positive', but: title"):
        read_corpus_document({"title": "b"}, None)
