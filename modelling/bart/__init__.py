"""BART: a post-norm encoder-decoder with learned positions."""
