"""Evaluation on the validation split: predictions and metrics."""
