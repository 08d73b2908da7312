"""Schedules: the host's steps in a run, as data without arrays and without JAX."""
