"""Measurements, one command each: `python3 -m benchmarks.NAME`."""
