"""Intermediate representation: ops, op definitions, regions, sharding metadata."""
