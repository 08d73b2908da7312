"""Hugging Face integration: hub, model folders and cards, PEFT files, PyTorch reference models."""
