"""Hugging Face: the hub, model folders and cards, and its own models on torch."""
