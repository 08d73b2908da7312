"""Hugging Face: the hub, model folders and cards, PEFT files, and reference models on torch."""
