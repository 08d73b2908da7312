"""Gradient accumulation with one reduction a step, beside one for each micro-batch.

- *Naive*, as `optax.MultiSteps` does it: each micro-batch's gradients are averaged over all
  devices, and go into a running mean; the optimizer steps at the last one.
- *Local*, as fine-tuning does it: each device adds up its own gradients, and one reduction a step
  averages the sums.

`programs`: both as PopXL programs, on the virtual devices of one process. `processes`: both in JAX,
in several processes that talk through gloo.
"""
