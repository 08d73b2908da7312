"""LLMQ (github.com/IST-DASLab/llmq) in a comparison: its token files, its command and its log."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np

from benchmarks.peer_programs import LEARNING_RATE, PeerWork, StepTimes
from config.sections import RunConfig
from data.causal_lm import PackedSequences, TokenBlocks
from modelling.model_family import get_family

MODEL_TYPES = ("qwen2", "llama")
"""Hugging Face's model types that it has."""

RECOMPUTE: tuple[tuple[str, ...], ...] = (
    (),
    ("--recompute-swiglu", "--recompute-norm"),
    ("--recompute-ffn", "--recompute-norm", "--recompute-att"),
)
"""Its flags for saved activations; the next ones where memory does not suffice."""

_HEADER_BYTES = 1024
_VERSION, _BYTES_PER_TOKEN = 2, 4
_STEP = re.compile(r"\[T\] step\s+(\d+) .*?time:\s*(\d+) ms.*?loss\s+([\d.]+)")


class LlmqError(RuntimeError):
    """LLMQ ended before its last step; the message has its last line."""


def write_token_file(
    path: Path, tokens: np.ndarray, vocab_size: int, in_loss: np.ndarray | None = None
) -> None:
    """Write tokens as LLMQ reads them: a header, int32 ids, and a bit for each in the loss."""
    fields = [_VERSION, _BYTES_PER_TOKEN, len(tokens), vocab_size, in_loss is not None]
    header = b"BIN.TOK\n" + np.array(fields, "<i4").tobytes()
    mask = b"" if in_loss is None else np.packbits(in_loss, bitorder="little").tobytes()
    path.write_bytes(header.ljust(_HEADER_BYTES, b"\0") + tokens.astype("<i4").tobytes() + mask)


def make_token_stream(
    work: PeerWork, config: RunConfig
) -> tuple[np.ndarray, np.ndarray | None, int, int]:
    """Returns the tokens of a step, which of them are in the loss, their rows, and their number.

    It does not pack: each text is a row of its own, padded to the sequence length.
    """
    samples, length = work.samples(config), config.model.sequence_length
    if isinstance(samples, TokenBlocks):
        rows = config.training.global_batch_size
        return samples.tokens[: rows * length + 1], None, rows, rows * length
    assert isinstance(samples, PackedSequences)
    texts = np.unique(samples.samples[samples.samples >= 0])
    tokens = np.zeros((len(texts), length), np.int32)
    in_loss = np.zeros(tokens.shape, bool)
    for row, text in enumerate(texts):
        start, end = samples.stream.offsets[text : text + 2]
        size = min(int(end - start), length)
        tokens[row, :size], in_loss[row, :size] = samples.stream.tokens[start : start + size], True
    in_loss[:, 0] = False  # nothing before it predicts it
    return tokens.ravel(), in_loss.ravel(), len(texts), int(in_loss.sum())


def prepare_llmq_command(
    binary: Path, folder: Path, work: PeerWork, config: RunConfig, recompute: Sequence[str]
) -> tuple[list[str], int]:
    """Write the model's config.json and token files to a folder.

    Returns:
        LLMQ's command line, and the tokens of a step without padding.
    """
    hf_config = get_family(config).to_config_json(config)
    (folder / "config.json").write_text(json.dumps(hf_config), "utf-8")
    tokens, in_loss, rows, count = make_token_stream(work, config)
    micro, repeats = config.execution.micro_batch_size, work.steps + 4
    accumulation = math.ceil(rows / micro)
    missing = (accumulation * micro - rows) * config.model.sequence_length
    train = np.tile(np.concatenate([tokens, np.zeros(missing, np.int32)]), repeats)
    mask = None
    if in_loss is not None:
        mask = np.tile(np.concatenate([in_loss, np.zeros(missing, bool)]), repeats)
    write_token_file(folder / "train.bin", train, config.model.vocab_size, mask)
    of_eval = slice(micro * config.model.sequence_length + 1)
    mask = None if mask is None else mask[of_eval]
    write_token_file(folder / "eval.bin", train[of_eval], config.model.vocab_size, mask)
    optimizer = config.training.optimizer
    dtypes = [f"--{name}-dtype=bf16" for name in ("model", "opt-m", "opt-v", "matmul")]
    options = {
        "train-file": folder / "train.bin",
        "eval-file": folder / "eval.bin",
        "batch-size": micro,
        "grad-accumulation": accumulation,
        "seq-len": config.model.sequence_length,
        "grad-clip": optimizer.gradient_clipping or 0,
        "weight-decay": optimizer.weight_decay,
        "learning-rate": LEARNING_RATE,
        "steps": 1000,  # it is ended before
        "gpus": 1,
        "eval-every-n-steps": 100_000,
        "eval-num-steps": 1,
        "ckpt-interval": 100_000,
        "checkpoint-dir": folder,
        "out-file": folder / "out.safetensors",
        "log-file": folder / "log.json",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [str(binary), f"--model={folder}", "--from-scratch", *dtypes, *recompute, *flags], count


def measure_llmq(binary: Path, work: PeerWork, folder: Path, timeout: float) -> dict[str, Any]:
    """Measure LLMQ's optimizer steps; it saves fewer activations where memory does not suffice.

    Raises:
        LlmqError: it ended, or took too long, with the most memory that can be saved.
    """
    config, end = work.config("cpu"), time.monotonic() + timeout
    for recompute in RECOMPUTE:
        command, count = prepare_llmq_command(binary, folder, work, config, recompute)
        started, first, steps = time.time(), 0.0, list[tuple[float, float]]()
        try:
            with closing(_run_steps(command, end - time.monotonic())) as running:
                for step in islice(running, work.steps + 2):
                    first = first or time.time() - started
                    steps.append(step)
        except LlmqError:
            if recompute == RECOMPUTE[-1] or end - time.monotonic() < 1:
                raise
            continue
        state = "bfloat16 weights, bfloat16 moments, bfloat16 sums"
        state += "".join(f", {flag.removeprefix('--')}" for flag in recompute)
        seconds = statistics.median(step[0] for step in steps[2:])
        micro = config.execution.micro_batch_size
        return asdict(StepTimes(seconds, first, count, steps[0][1], state, micro))
    raise AssertionError("unreachable")


def _run_steps(command: Sequence[str], timeout: float) -> Generator[tuple[float, float]]:
    """Yields seconds and loss of each step of a running LLMQ; ends it afterwards."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    timer = Timer(max(timeout, 0), process.kill)
    timer.start()
    last = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            if found := _STEP.search(line):
                yield int(found[2]) / 1000, float(found[3])
        raise LlmqError(f"ended with exit code {process.wait()}: {last}")
    finally:
        timer.cancel()
        process.kill()
        process.communicate()
