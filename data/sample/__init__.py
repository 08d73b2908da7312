"""The sample corpus: a small natural-language-inference data set of our own (see ../README.md)."""
