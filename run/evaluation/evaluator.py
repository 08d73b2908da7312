"""Evaluation of a configured model on its validation split, for any weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from tqdm import tqdm

from config.errors import ConfigError
from config.sections import RunConfig
from data.loaded import Loaded
from data.pipeline import Pipeline
from data.samples import Samples
from data.task import Task, task_of
from data.tokens import warn_truncated
from modelling.generation.strategies import strategy_of
from modelling.objectives import objective_of
from modelling.spec import ModelFamily
from run.evaluation.metrics import TEXT_METRICS
from run.evaluation.outcome import Answer, Outcome
from sessions.generating import Inference
from sessions.losses import Losses
from sessions.running import RunningModel, compiled
from terminal.screen import is_first_process, say


class Evaluator:
    """Programs and data of an evaluation, ready for weights. The metrics decide what is computed:
    the loss, answers, or both. The constructor reads the data and compiles the programs.
    """

    def __init__(
        self,
        config: RunConfig,
        family: ModelFamily,
        lender: RunningModel | None = None,
        loaded: Loaded | None = None,
        refer: Callable[[Samples], Samples] | None = None,
    ) -> None:
        """
        Args:
            lender: the model whose weights are evaluated while it is entered, if there is one.
                Weights that both programs store alike are not copied.
            loaded: what the run shares; None: it has loaded nothing yet.
            refer: gives samples what the objective's reference says of them.

        Raises:
            UserError: data, tokenizer or metrics do not fit, or there are too few devices or too
                little memory.
        """
        task = task_of(config.data, config.training.prefers)
        self.metrics = wanted_metrics(config, task)
        data = Pipeline(config, family.sample_format, loaded or Loaded())
        corpus = data.corpus("validation")  # first: its advice helps offline
        self._tokenizer, config = data.tokenizer, data.config
        rows = config.evaluation.samples
        corpus = corpus.first(rows and rows * (2 if task.prefers == "pairs" else 1))
        data.agree(corpus)
        self._labels = task.labels
        self._targets = [example.target for example in corpus.examples]
        self.facts = {"task": task.name, "left_out_without_label": corpus.unlabelled}
        self._stops = config.generation.stops()
        self._losses: Losses | None = None
        self._inference: Inference | None = None
        if any(name in objective_of(config).metrics for name in self.metrics):
            samples = data.samples(corpus, evaluated=True)
            self._samples = samples if refer is None else refer(samples)
            self._count_cut(self._samples.cuts.prompts)
            self._losses = compiled(
                lambda: Losses(config, family, lender), "the program of the loss"
            )
        if any(name in TEXT_METRICS for name in self.metrics):
            fitted, self._prompts = data.answering(corpus)
            self._count_cut(self._prompts.truncated)
            self._inference = compiled(
                lambda: Inference(fitted, family, strategy_of(fitted, data.tokenizer), lender),
                "the program that generates",
            )

    def _count_cut(self, prompts: int) -> None:
        """Say once, and note, how many prompts are longer than what is read."""
        if prompts and "prompts_cut" not in self.facts:
            total = len(self._targets)
            say(f"warning: {prompts} of {total} prompts of the validation split are cut")
        self.facts["prompts_cut"] = prompts

    def evaluate(self, weights: Mapping[str, np.ndarray], quiet: bool = False) -> Outcome:
        """The metrics of a model with these weights, whole tensors by logical name.

        Args:
            quiet: show no bars.
        """
        values: dict[str, float] = {}
        if self._losses is not None:
            self._losses.write(weights)
            with self._losses, _bar("loss", len(self._samples), quiet) as bar:
                loss = self._losses.of(self._samples, bar.update)
            metrics_of = self._losses.objective.metrics.items()
            values |= {name: metric(loss.tally) for name, metric in metrics_of}
        texts: list[str] = []
        if self._inference is not None:
            self._inference.write(weights)
            prompts = self._prompts
            with self._inference, _bar("answers", len(prompts), quiet) as bar:
                tokens = self._inference.generate(prompts.words, prompts.mask, bar.update)
            warn_truncated(tokens, self._tokenizer, self._stops)
            texts = self._tokenizer.texts(tokens)
            for name in self.metrics:
                if name in TEXT_METRICS:
                    values[name] = TEXT_METRICS[name](texts, self._targets)
        rows = zip(self._prompts.texts, texts, self._targets, strict=True) if texts else ()
        answers = [Answer(*row) for row in rows]
        metrics = {name: values[name] for name in self.metrics}
        return Outcome(metrics, answers, self._labels, self.facts)


def wanted_metrics(config: RunConfig, task: Task) -> tuple[str, ...]:
    """The metrics of a run: those that `evaluation.metrics` names, else what suits the task.

    Raises:
        ConfigError: a metric does not suit the task.
    """
    suitable = (*task.metrics, *objective_of(config).metrics)
    names = config.evaluation.names() or suitable
    watched = config.watched
    for name in [*names, *([] if watched is None else [watched])]:
        if name not in suitable:
            raise ConfigError(
                f"the metric {name} does not suit the task {task.name}, which has: "
                f"{', '.join(suitable)}"
            )
    return tuple(dict.fromkeys([*names, *([] if watched is None else [watched])]))


def _bar(what: str, total: int, quiet: bool) -> tqdm:
    """There is no bar without a terminal: its states would only clutter a log."""
    return tqdm(
        desc=what, total=total, unit="sample", disable=quiet or not is_first_process() or None,
        leave=False,
        dynamic_ncols=True,
    )  # fmt: skip
