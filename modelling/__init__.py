"""Models: layers, families, objectives, phases of training, generation and weights."""
