"""A compiled program, and the walk over its schedule that runs it."""
