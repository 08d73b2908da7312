"""The machine: its devices, its memory, and what is put where."""
