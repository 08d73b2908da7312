"""Hugging Face: models written for it, and its own model compared with ours."""
