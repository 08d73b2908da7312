"""Storage of remote buffers (host, device, disk) and of variables, and the movers between them."""
