"""Where values live: entries of remote buffers, on disk too, and variables."""
