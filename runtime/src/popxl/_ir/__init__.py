"""The IR as data: ops, their definitions, and what graphs and tensors are made of."""
