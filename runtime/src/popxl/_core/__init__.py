"""The IR as data: op definitions, ops, effects, checking, text."""
