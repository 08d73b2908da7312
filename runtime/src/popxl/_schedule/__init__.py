"""What the host does in a run, as data: no arrays, and no JAX."""
