"""Evaluation: answers to the validation split, and their metrics."""
