"""What is found out about graphs: effects, aliases, the functional form, text."""
