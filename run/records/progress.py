"""Progress of training: a progress bar in a terminal, lines in a log."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from tqdm import tqdm

from files.formatting import format_number
from run.records.throughput import Throughput

EVAL_PREFIX = "eval_"
"""Name prefix of evaluation metrics."""
PRIORITIES = ("loss", "left", "validation", "speed", "skipped", "rate", "epoch", "norm")
"""Topics by priority; a narrow bar shows the first ones."""

SECONDS_BETWEEN_LINES = 10.0
"""Interval between lines if the stream is no terminal."""


class TrainingProgress:
    """Progress display: steps done, loss, learning rate, samples per second and time left."""

    def __init__(
        self,
        total_steps: int,
        throughput: Throughput,
        first_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        """Start the progress bar.

        Args:
            total_steps: number of steps of the run.
            throughput: measured throughput, which the caller updates.
            first_step: number of steps done before.
            stream: output; default: stderr, as stdout is for results.
            clock: returns seconds.
            columns: returns the width of the terminal.
        """
        self._total = total_steps
        self._throughput = throughput
        self._stream = stream or sys.stderr
        self._clock = clock
        self._last_line: float | None = None
        self._bar: tqdm | None = None
        self._evaluated = ""
        self._columns = columns
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                file=self._stream,
                unit="step",
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            )

    def update(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a training step; those of an evaluation have the prefix `eval_`."""
        done = int(metrics["step"])
        texts = self._format_metrics(metrics, self._total - done)
        if self._bar is not None:
            self._bar.set_postfix_str(self._fit_width(texts, done), refresh=False)
            self._bar.update(done - self._bar.n)
        elif self._line_is_due(done) or self._is_evaluated(metrics):
            text = ", ".join(texts.values())
            print(f"step {done}/{self._total}: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Close the progress bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()

    def _line_is_due(self, steps_done: int) -> bool:
        now = self._clock()
        waited = self._last_line is None or now - self._last_line >= SECONDS_BETWEEN_LINES
        if waited or steps_done == self._total:
            self._last_line = now
            return True
        return False

    def _format_metrics(self, metrics: Mapping[str, float], steps_left: int) -> dict[str, str]:
        """Format the metrics to show on the progress bar, grouped by topic."""
        texts = {"loss": f"loss {format_number(metrics['loss'])}"}
        if "grad_norm" in metrics:
            texts["norm"] = f"gradient norm {format_number(metrics['grad_norm'])}"
        texts["rate"] = f"learning rate {metrics['learning_rate']:.2e}"
        if "epoch" in metrics:
            texts["epoch"] = f"epoch {metrics['epoch']:.2f}"
        if metrics.get("skipped_steps"):
            texts["skipped"] = f"{metrics['skipped_steps']:.0f} skipped"
        if self._is_evaluated(metrics):
            names = [name for name in metrics if name.startswith(EVAL_PREFIX)]
            metric_texts = [
                f"{name.removeprefix(EVAL_PREFIX)} {format_number(metrics[name])}" for name in names
            ]
            self._evaluated = "validation " + " ".join(metric_texts)
            texts["validation"] = self._evaluated
        elif self._bar is not None and self._evaluated:
            texts["validation"] = self._evaluated
        rate = self._throughput.samples_per_second
        eta = self._throughput.eta_seconds(steps_left)
        if rate is not None and eta is not None:
            texts["speed"] = f"{rate:.1f} samples/s"
            texts["left"] = f"{tqdm.format_interval(eta)} left"
        return texts

    def _is_evaluated(self, metrics: Mapping[str, float]) -> bool:
        return any(name.startswith(EVAL_PREFIX) for name in metrics)

    def _fit_width(self, texts: Mapping[str, str], steps_done: int) -> str:
        """Join the most important texts that fit into the terminal's width."""
        width = self._columns() - len(f"100%|    | {steps_done}/{self._total} [00:00:00]") - 1
        fitting: set[str] = set()
        for name in (n for n in PRIORITIES if n in texts):
            if sum(len(texts[n]) + 2 for n in (*fitting, name)) <= width:
                fitting.add(name)
        return ", ".join(text for name, text in texts.items() if name in fitting)
