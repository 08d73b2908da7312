"""The devices that run a program, and what only a CPU needs."""
