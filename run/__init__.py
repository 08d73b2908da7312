"""Training runs: training loop, checkpoints, resuming, evaluation, export and chat."""
