"""T5Gemma: an encoder-decoder made of two Gemma decoders."""
