"""Command lines, signals, standard streams and messages for the user."""
