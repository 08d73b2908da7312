"""Generated answers: for prompts of a file, or in a chat."""
