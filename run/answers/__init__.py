"""Generated answers to prompts from a file, or in a chat."""
