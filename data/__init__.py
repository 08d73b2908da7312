"""Examples, prompts, token arrays and their order: from text to what a program is fed with."""
