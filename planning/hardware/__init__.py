"""The hardware: the table of machines, the local machine, its memory and its disk."""
