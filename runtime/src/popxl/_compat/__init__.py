"""PopART's session options, handles and module paths, most of which have no effect on XLA."""
