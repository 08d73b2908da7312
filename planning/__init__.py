"""What a configuration needs and how long it takes, before anything is loaded or compiled.

The runtime says what its program does (`popxl.plan`); here that becomes memory per device and per
host, and a time on a machine of the hardware table.
"""
