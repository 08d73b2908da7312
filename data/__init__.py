"""Data pipeline: rows, examples, tokens, samples and batches."""
