"""Examples, prompts, token arrays and their order: from text to a program's inputs."""
