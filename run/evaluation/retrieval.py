"""Retrieval: how many of an anchor's positives are among the documents nearest to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from config.sections import RunConfig
from data.contrastive_rows import read_corpus_document
from data.examples import Corpus
from data.pipeline import Pipeline
from data.prompt_template import ColumnError
from data.sources import DataError, source_from_name
from data.text_samples import make_text_samples, tokenize_texts
from data.token_sequences import TokenSequences
from sessions.loss_evaluation import LossSession

MAX_RANK = 10
"""Number of the nearest documents that the metrics look at."""
BLOCK_SCORES = 2**26
"""Number of scores that are computed at a time."""


@dataclass(frozen=True)
class Retrieval:
    """Anchors to find documents for: the texts, tokenized, and the documents that fit an anchor.

    Attributes:
        samples: of all texts, the anchors first.
        relevant: for each anchor, the indices of its positives among the documents.
        num_documents: number of documents.
    """

    samples: TokenSequences
    relevant: Sequence[frozenset[int]]
    num_documents: int

    @classmethod
    def from_corpus(cls, config: RunConfig, data: Pipeline, corpus: Corpus) -> Retrieval:
        """Take the anchors of a split, and the other texts of it and `eval.corpus` as documents.

        Equal texts are one anchor or document.
        """
        texts, per_row = [e.target for e in corpus.examples], data.task.examples_per_row
        anchors, positives = texts[::per_row], texts[1::per_row]
        negatives = (text for i, text in enumerate(texts) if i % per_row > 1)
        read = [*positives, *negatives, *_read_documents(config, data)]
        number = {text: i for i, text in enumerate(dict.fromkeys(filter(None, read)))}
        relevant: dict[str, set[int]] = {}
        for anchor, positive in zip(anchors, positives, strict=True):
            relevant.setdefault(anchor, set()).add(number[positive])
        # A longer text is cut, as by the exported model.
        config = replace(config, data=replace(config.data, on_long_target="truncate"))
        tokens = tokenize_texts([*relevant, *number], config, data.tokenizer)
        samples = make_text_samples(tokens, 1, config, data.tokenizer)
        return cls(samples, [*map(frozenset, relevant.values())], len(number))

    def metrics(self, session: LossSession) -> dict[str, float]:
        """Compute the metrics of `RETRIEVAL_METRICS` for a session's weights; collective."""
        vectors = embed(session, self.samples)
        return retrieval_metrics(
            vectors[: len(self.relevant)], vectors[len(self.relevant) :], self.relevant
        )


def embed(session: LossSession, samples: TokenSequences) -> np.ndarray:
    """Compute the vectors of single texts: float32 [texts, hidden], of length 1."""
    vectors = np.zeros((0, 0), np.float32)
    for rows, by_sample in session.loss_stats(samples):
        texts = samples.slots[rows]
        if not vectors.size:
            vectors = np.zeros((len(samples.sequences), by_sample.shape[-1]), np.float32)
        is_text = texts >= 0
        vectors[texts[is_text]] = by_sample[is_text]
    return vectors


def retrieval_metrics(
    queries: np.ndarray, documents: np.ndarray, relevant: Sequence[frozenset[int]]
) -> dict[str, float]:
    """Compute the metrics of `RETRIEVAL_METRICS`, means over queries.

    recall@k: the share of a query's relevant documents that are among the k nearest; ndcg@10: the
    sum of 1 / log2(1 + rank) over those among the 10 nearest, divided by that of the best order.

    Args:
        queries, documents: float32 [n, hidden], of length 1.
        relevant: indices of the documents that a query should find.
    """
    hits = np.zeros((len(queries), MAX_RANK))
    for row, found in enumerate(_nearest(queries, documents)):
        hits[row, : len(found)] = [index in relevant[row] for index in found.tolist()]
    counts = np.asarray([len(indices) for indices in relevant])
    gains = 1 / np.log2(np.arange(MAX_RANK) + 2)
    best = np.cumsum(gains)[np.minimum(counts, MAX_RANK) - 1]
    recalls = {f"recall@{k}": float((hits[:, :k].sum(1) / counts).mean()) for k in (1, 5, 10)}
    return {**recalls, "ndcg@10": float((hits @ gains / best).mean())}


def _nearest(queries: np.ndarray, documents: np.ndarray) -> Sequence[np.ndarray]:
    """Indices of the `MAX_RANK` documents nearest to each query, the nearest first."""
    nearest, block = [], max(BLOCK_SCORES // len(documents), 1)
    for start in range(0, len(queries), block):
        scores = queries[start : start + block] @ documents.T
        count = min(MAX_RANK, len(documents))
        top = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        order = np.argsort(-np.take_along_axis(scores, top, 1), axis=1, kind="stable")
        nearest += [*np.take_along_axis(top, order, 1)]
    return nearest


def _read_documents(config: RunConfig, data: Pipeline) -> list[str]:
    """Read the texts of `eval.corpus`.

    Raises:
        DataError: a row has no text.
    """
    if config.eval.corpus is None:
        return []
    documents = []
    for location, row in source_from_name(config.eval.corpus, "train").read_rows():
        try:
            documents.append(read_corpus_document(row, data.task.target))
        except ColumnError as error:
            raise DataError(f"{location}: {error}") from None
    return documents
