"""Execution of a compiled program: schedule executor, variables on devices, streams, timing."""
