"""Answers of a model to prompts, from files or in a conversation."""
