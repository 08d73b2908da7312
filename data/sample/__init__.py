"""The sample corpus: a small synthetic natural-language-inference data set (see ../README.md)."""
