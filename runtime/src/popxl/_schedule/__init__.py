"""Schedules: the steps of the host in a run, as data without arrays and without JAX."""
