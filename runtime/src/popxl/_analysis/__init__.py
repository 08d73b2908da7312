"""Analyses of graphs: effects, aliases, functionalization, shape inference, printing."""
