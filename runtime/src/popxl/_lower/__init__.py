"""From an Ir to one compiled XLA program."""
