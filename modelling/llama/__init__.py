"""Llama-shaped decoders: one family, whose configuration says what an architecture does."""
