"""Terminal interface: command lines, signals, standard streams and messages."""
