"""Progress on a terminal and in a log."""

from __future__ import annotations

import io

from run.records.progress import TrainingProgress
from run.records.throughput import Throughput


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(stream, steps, seconds_per_step, first_step=0, columns=100):
    now = [0.0]
    throughput = Throughput(samples_per_step=16, clock=lambda: now[0])
    progress = TrainingProgress(
        steps, throughput, first_step, stream, clock=lambda: now[0], columns=lambda: columns
    )
    for step in range(first_step, steps):
        now[0] += seconds_per_step
        throughput.update(step + 1)
        progress.update({"step": step + 1, "loss": 1.5, "learning_rate": 1e-3})
    progress.close()
    return stream.getvalue()


def test_a_log_gets_a_line_every_ten_seconds_and_the_last():
    lines = run(io.StringIO(), steps=13, seconds_per_step=2.0).splitlines()
    assert lines == [
        "step 1/13: loss 1.5000, learning rate 1.00e-03",
        "step 6/13: loss 1.5000, learning rate 1.00e-03, 8.0 samples/s, 00:14 left",
        "step 11/13: loss 1.5000, learning rate 1.00e-03, 8.0 samples/s, 00:04 left",
        "step 13/13: loss 1.5000, learning rate 1.00e-03, 8.0 samples/s, 00:00 left",
    ]


def test_a_terminal_gets_a_bar():
    shown = run(Terminal(), steps=4, seconds_per_step=60.0, first_step=2)
    last = shown.rsplit("\r", 1)[-1]
    assert "100%" in last
    assert "4/4" in last
    assert "loss 1.5000, learning rate 1.00e-03, 0.3 samples/s, 00:00 left" in last
    narrow = run(Terminal(), steps=4, seconds_per_step=60.0, first_step=2, columns=60)
    assert "loss 1.5000, 00:00 left" in narrow
    assert "learning rate" not in narrow
    assert " 2/4" in shown.split("\r")[1]  # a resumed run starts where it was


def test_a_log_has_epoch_and_grad_norm():
    stream = io.StringIO()
    progress = TrainingProgress(1, Throughput(samples_per_step=16), stream=stream)
    row = {"step": 1, "loss": 1.5, "learning_rate": 1e-3, "grad_norm": 0.25, "epoch": 1.375}
    progress.update(row)
    assert stream.getvalue() == (
        "step 1/1: loss 1.5000, gradient norm 0.2500, learning rate 1.00e-03, epoch 1.38\n"
    )


def test_skipped_steps_are_shown_once_there_are_any():
    stream = io.StringIO()
    progress = TrainingProgress(1, Throughput(samples_per_step=16), stream=stream)
    row = {"step": 1, "loss": 1.5, "learning_rate": 1e-3}
    progress.update(row | {"skipped_steps": 0, "loss": 3.41e-5})
    progress.update(row | {"skipped_steps": 3, "eval_perplexity": 121478137.4})
    first, second = stream.getvalue().splitlines()
    assert first == "step 1/1: loss 3.4e-05, learning rate 1.00e-03"
    assert (
        second
        == "step 1/1: loss 1.5000, learning rate 1.00e-03, 3 skipped, validation perplexity 1.2e+08"
    )
