"""From segments to executables."""
