"""Schedules: a run's steps on the host (transfers, segment runs), as data without arrays or JAX."""
