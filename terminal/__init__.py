"""The terminal: command lines, signals, and what a person is told."""
