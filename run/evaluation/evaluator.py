"""Evaluator of model weights on the validation split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from config.errors import ConfigError
from config.metrics import RETRIEVAL_METRICS
from config.sections import RunConfig
from data.class_labels import ClassLabels
from data.data_cache import DataCache
from data.examples import Corpus
from data.label_candidates import LabelCandidates
from data.pipeline import Pipeline
from data.task import Task, task_from_config
from modelling.model_family import get_family
from modelling.objectives import make_objective
from run.evaluation.eval_result import EvalResult, Prediction
from run.evaluation.predictors import GenerativePredictor, LabelPredictor
from run.evaluation.retrieval import Retrieval
from run.evaluation.text_metrics import (
    NO_LABEL,
    SACREBLEU_METRICS,
    TEXT_METRICS,
    sacrebleu_scores,
)
from run.frozen_outputs import OutputsSource
from sessions.loss_evaluation import LossSession
from sessions.session import ModelSession, compile_session
from terminal.screen import progress_bar, say


class Evaluator:
    """Compiled programs and validation data, to evaluate any weights of one model.

    The metrics decide which programs are built: the loss, predictions, or both.
    """

    def __init__(
        self,
        config: RunConfig,
        weight_source: ModelSession | None = None,
        data_cache: DataCache | None = None,
        frozen: OutputsSource | None = None,
    ) -> None:
        """Prepare evaluations: read the validation split; programs are compiled on first use.

        Args:
            weight_source: the model whose weights are evaluated while it is entered, if there is
                one. Weights that both programs store alike are not copied.
            data_cache: what the run shares; None: it has loaded nothing yet.
            frozen: the objective's reference or teacher; None: it needs none.

        Raises:
            UserError: data, tokenizer or metrics do not fit, or there are too few devices or too
                little memory.
        """
        training = config.training
        task = task_from_config(config.data, training.row_type, training.negatives)
        self.metrics = resolve_metrics(config, task)
        data = Pipeline(config, get_family(config).sample_format, data_cache or DataCache())
        corpus = data.read_corpus("validation")  # first, as its errors have advice for offline use
        config = data.config
        rows = config.eval.samples
        corpus = corpus.first_examples(rows and rows * task.examples_per_row)
        data.check_processes_agree(corpus)
        self._labels = None if task.labels is None else ClassLabels(task.labels)
        self._prompts = [example.prompt for example in corpus.examples]
        self._targets = [example.target for example in corpus.examples]
        self._languages = [example.languages for example in corpus.examples]
        self.info = {"task": task.name, "left_out_without_label": corpus.unlabeled}
        self._losses: LossSession | None = None
        self._retrieval: Retrieval | None = None
        if any(name in RETRIEVAL_METRICS for name in self.metrics):
            self._retrieval = Retrieval.from_corpus(config, data, corpus)
            self.info |= {"documents": self._retrieval.num_documents}
        needs_losses = any(name in make_objective(config).metrics for name in self.metrics)
        if needs_losses or self._retrieval is not None:
            samples = data.make_samples(corpus, for_eval=True)
            self._samples = samples if frozen is None else frozen.extend_samples(samples)
            self._warn_truncated(self._samples.truncation_counts.prompts)
            teacher_head = None if frozen is None else frozen.teacher_head
            self._losses = compile_session(
                lambda: LossSession(config, weight_source, teacher_head=teacher_head),
                "the program of the loss",
            )
        self._predictor: GenerativePredictor | LabelPredictor | None = None
        answers = {*task.metric_names}.difference(RETRIEVAL_METRICS)
        needs_predictions = not answers.isdisjoint(self.metrics)
        if config.eval.constrained and not needs_predictions:
            say("eval.constrained is not used: eval.metrics has none of answers")
        if needs_predictions:
            self._predictor = _create_predictor(config, data, corpus, weight_source)
            self._warn_truncated(self._predictor.num_truncated)

    def _warn_truncated(self, prompts: int) -> None:
        """Warn once that validation prompts were truncated, and record their number."""
        if prompts and "prompts_cut" not in self.info:
            total = len(self._targets)
            say(f"warning: {prompts} of {total} prompts of the validation split are cut")
        self.info["prompts_cut"] = prompts

    def evaluate(self, weights: Mapping[str, np.ndarray], quiet: bool = False) -> EvalResult:
        """Compute metrics and predictions of a model; `weights` are full tensors by logical name.

        Args:
            quiet: show no progress bars.
        """
        values: dict[str, float] = {}
        if self._losses is not None:
            self._losses.write(weights)
            bar = progress_bar("loss", len(self._samples), "sample", quiet=quiet)
            with self._losses, bar:
                loss = self._losses.compute(self._samples, bar.update)
                if self._retrieval is not None:
                    values |= self._retrieval.metrics(self._losses)
            metrics_of = self._losses.objective.metrics.items()
            values |= {name: metric(loss.metric_sums) for name, metric in metrics_of}
        predictions: list[Prediction] = []
        by_direction: dict[str, dict[str, Any]] = {}
        if self._predictor is not None:
            with progress_bar("answers", len(self._predictor), "sample", quiet=quiet) as bar:
                texts = self._predictor.predict(weights, bar.update)
            predictions = [*map(self._to_prediction, self._prompts, texts, self._targets)]
            values |= self._text_metrics(predictions)
            by_direction = self._sacrebleu(predictions)
            for name in set(self.metrics).intersection(SACREBLEU_METRICS):
                values[name] = fmean(scores[name] for scores in by_direction.values())
        metrics = {name: values[name] for name in self.metrics}
        names = None if self._labels is None else self._labels.names
        info = {**self.info, "sacrebleu": by_direction} if by_direction else self.info
        return EvalResult(metrics, predictions, names, info)

    def _to_prediction(self, prompt: str, text: str, target: str) -> Prediction:
        """Pair a generated text with its target text; in classification, both become labels."""
        if self._labels is None:
            return Prediction(prompt, text, target)
        label = self._labels.parse_answer(text, target)
        return Prediction(
            prompt, text if label is None else label, self._labels.split_at_label(target)[1]
        )

    def _text_metrics(self, predictions: Sequence[Prediction]) -> dict[str, float]:
        """Compute text metrics, such as ROUGE-L, of the predicted answers."""
        texts = [answer.generated for answer in predictions]
        if self._labels is not None:
            texts = [text if text in self._labels.names else NO_LABEL for text in texts]
        targets = [answer.expected for answer in predictions]
        names = (name for name in self.metrics if name in TEXT_METRICS)
        return {name: TEXT_METRICS[name](texts, targets) for name in names}

    def _sacrebleu(self, predictions: Sequence[Prediction]) -> dict[str, dict[str, Any]]:
        """Compute sacrebleu's metrics by direction of translation, with their signatures."""
        texts = [answer.generated for answer in predictions]
        by_direction: dict[str, dict[str, Any]] = {}
        for name in (name for name in self.metrics if name in SACREBLEU_METRICS):
            scores = sacrebleu_scores(name, texts, self._targets, self._languages)
            for direction, (score, signature) in scores.items():
                entry = {name: score, f"{name}_signature": signature}
                by_direction.setdefault(direction, {}).update(entry)
        return by_direction


def _create_predictor(
    config: RunConfig, data: Pipeline, corpus: Corpus, weight_source: ModelSession | None
) -> GenerativePredictor | LabelPredictor:
    """Create the predictor of answers to the prompts of the validation examples."""
    if config.eval.constrained:
        return LabelPredictor(
            LabelCandidates.from_examples(data, corpus, data.task.labels or ()), weight_source
        )
    return GenerativePredictor(data, corpus, weight_source)


def resolve_metrics(config: RunConfig, task: Task) -> tuple[str, ...]:
    """Return the metrics to compute: `eval.metrics`, or all that suit the task.

    Raises:
        ConfigError: a metric does not suit the task, or the task has no labels to choose from.
    """
    if config.eval.constrained and not (task.labels and "accuracy" in task.metric_names):
        raise ConfigError(
            f"eval.constrained chooses among labels, but the task {task.name} has none: give "
            "--data.class_labels, or leave it out"
        )
    suitable = (*task.metric_names, *make_objective(config).metrics)
    names = config.eval.metric_names() or suitable
    watched = config.best_metric
    for name in [*names, *([] if watched is None else [watched])]:
        if name not in suitable:
            raise ConfigError(
                f"the metric {name} does not suit the task {task.name}, which has: "
                f"{', '.join(suitable)}"
            )
    return tuple(dict.fromkeys([*names, *([] if watched is None else [watched])]))
