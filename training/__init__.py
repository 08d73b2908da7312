"""The loop over optimizer steps, and what belongs to it."""
