"""Known machines and the local one: rates, memory and disks."""
