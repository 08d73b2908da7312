"""Predictors of answers: by text generation, or by the most likely class label."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from config.sections import RunConfig
from data.examples import Corpus
from data.label_candidates import LabelCandidates
from data.pipeline import Pipeline
from data.tokenizer import warn_truncated_answers
from modelling.generation.decoding_strategy import strategy_from_config
from sessions.generation import GenerationSession
from sessions.loss_evaluation import LossSession
from sessions.session import ModelSession, compile_session

OnProgress = Callable[[int], object] | None
"""Callback with the number of newly finished samples."""


class GenerativePredictor:
    """Predicts answers by generating text.

    Attributes:
        cut: number of truncated prompts.
    """

    def __init__(self, data: Pipeline, corpus: Corpus, weight_source: ModelSession | None) -> None:
        """Compile the program. Raises as `Pipeline.make_eval_prompts`."""
        resolved_config, self._prompts = data.make_eval_prompts(corpus)
        self.num_truncated, self._tokenizer = self._prompts.num_truncated, data.tokenizer
        self._stops = data.config.generation.parse_stop_strings()
        self._inference = compile_session(
            lambda: GenerationSession(
                resolved_config,
                strategy_from_config(resolved_config, data.tokenizer, self._prompts),
                weight_source,
            ),
            "the program that generates",
        )

    def __len__(self) -> int:
        return len(self._prompts)

    def predict(
        self, weights: Mapping[str, np.ndarray], on_progress: OnProgress = None
    ) -> list[str]:
        """Generate the answer to each prompt; `weights` are full tensors by logical name."""
        self._inference.write(weights)
        with self._inference:
            tokens = self._inference.generate(
                self._prompts.input_ids, self._prompts.mask, on_progress
            )
        warn_truncated_answers(tokens, self._tokenizer, self._stops)
        return self._tokenizer.decode(tokens)


class LabelPredictor:
    """Predicts as answer the class label of the highest log-probability."""

    def __init__(
        self, candidates: LabelCandidates, weight_source: ModelSession | None = None
    ) -> None:
        """Compile the program that computes log-probabilities of labels."""
        self._candidates, self.num_truncated = candidates, candidates.cut
        config: RunConfig = candidates.config
        self._losses = compile_session(
            lambda: LossSession(config, weight_source), "the program that compares labels"
        )

    def __len__(self) -> int:
        return len(self._candidates.samples)

    def predict(
        self, weights: Mapping[str, np.ndarray], on_progress: OnProgress = None
    ) -> list[str]:
        best = self.scores(weights, on_progress).argmax(axis=1)
        return [self._candidates.labels.names[i] for i in best]

    def scores(
        self, weights: Mapping[str, np.ndarray], on_progress: OnProgress = None
    ) -> np.ndarray:
        """Return the log-probability of each label after each prompt, float32 (prompts, labels)."""
        samples = self._candidates.samples
        logps = np.empty((*samples.pair_indices.shape, 2), np.float32)
        self._losses.write(weights)
        with self._losses:
            for batch, batch_logps in self._losses.loss_stats(samples):
                logps[batch] = batch_logps
                if on_progress is not None:
                    on_progress(batch.stop - batch.start)
        return self._candidates.logps_by_example(logps)
