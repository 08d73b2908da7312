"""Data pipeline: from rows of data files to tokenized samples and batches."""
