"""Gradient accumulation with one reduction a step, and with one for each micro-batch.

- *Naive*, as `optax.MultiSteps` does it: each micro-batch's gradients are averaged over all
  devices, and go into a running mean; the optimizer steps at the last one.
- *Local*, as fine-tuning does it: each device adds up its own gradients, and one reduction a step
  averages the sums.

Both are PopXL programs, for virtual devices of one process or for several processes.
"""
