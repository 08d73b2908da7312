"""Devices and their mesh, host memory, and workarounds for XLA's CPU backend."""
