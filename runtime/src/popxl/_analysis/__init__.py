"""Analyses of graphs: side effects, aliases, functionalization, shape inference, printing."""
