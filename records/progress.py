"""What a person sees while training runs: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from tqdm import tqdm

from records.throughput import Throughput


class Progress:
    """Shows the steps done, loss, learning rate, samples per second and the time left."""

    def __init__(
        self,
        total_steps: int,
        throughput: Throughput,
        first_step: int = 0,
        stream: TextIO | None = None,
        seconds_between_lines: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start showing.

        Args:
            total_steps: steps of the whole run.
            throughput: measures the rate; the caller updates it.
            first_step: steps that an earlier run did.
            stream: where to; stderr by default, since stdout is for results.
            seconds_between_lines: pause between lines where the stream is no terminal.
            clock: gives seconds.
        """
        self._total = total_steps
        self._throughput = throughput
        self._stream = stream or sys.stderr
        self._pause = seconds_between_lines
        self._clock = clock
        self._last_line: float | None = None
        self._bar: tqdm | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                file=self._stream,
                unit="step",
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            )

    def update(self, row: Mapping[str, float]) -> None:
        """Show a step that is done: `step` from 0, `loss`, `learning_rate`, `skipped_steps`."""
        done = int(row["step"]) + 1
        facts = self._facts(row, self._total - done)
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(facts), refresh=False)
            self._bar.update(done - self._bar.n)
        elif self._line_is_due(done):
            print(f"step {done}/{self._total}: {', '.join(facts)}", file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def _line_is_due(self, done: int) -> bool:
        now = self._clock()
        waited = self._last_line is None or now - self._last_line >= self._pause
        if waited or done == self._total:
            self._last_line = now
            return True
        return False

    def _facts(self, row: Mapping[str, float], steps_left: int) -> list[str]:
        facts = [f"loss {row['loss']:.4f}", f"learning rate {row['learning_rate']:.2e}"]
        if row.get("skipped_steps"):
            facts.append(f"{row['skipped_steps']:.0f} skipped")
        rate = self._throughput.samples_per_second
        left = self._throughput.seconds_for(steps_left)
        if rate is not None and left is not None:
            facts += [f"{rate:.1f} samples/s", f"{tqdm.format_interval(left)} left"]
        return facts
