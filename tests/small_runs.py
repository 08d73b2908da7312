"""The smallest run of the scripts, whose programs several files of tests share."""

from __future__ import annotations

MODEL = ("--config", "tiny", "--layers", "1", "--hidden_size", "32", "--d_ff", "32", "--heads", "2")
BATCH = ("--global_batch_size", "8", "--micro_batch_size", "4")
# A rate that does not depend on the number of steps lets a shorter run be lengthened.
RATE = (
    *("--training.optimizer.learning_rate.function", "constant", "--learning_rate", "1e-3"),
    *("--training.optimizer.learning_rate.warmup_proportion", "0"),
)
TRAINING = (*MODEL, *BATCH, *RATE, "--dropout_prob", "0.1")

COMPILE_QUICKLY = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
"""Environment of processes in which neither bits nor speed are what is tested."""
