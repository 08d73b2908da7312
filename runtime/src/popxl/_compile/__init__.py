"""Lowering of segments to JAX, compilation by XLA, and the executable cache."""
