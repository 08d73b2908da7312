"""BART: an encoder-decoder whose norms follow the residuals, with learned positions."""
