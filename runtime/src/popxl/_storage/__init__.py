"""Storage of variables and remote buffers (host, device, disk), and the entry movers."""
