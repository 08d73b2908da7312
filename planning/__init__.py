"""Plans of training and generation: memory and time, simulated before loading and compiling.

`popxl.plan` reads the work, traffic and memory of a program; this package turns them into memory of
devices and hosts, and into times on a machine of the hardware table.
"""
