"""Training in float16 or bfloat16 in torch, with float32 moments, as ours does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tests.modelling.torch_training import Batch, Reference


def rounded(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """`model`, with its weights rounded to `dtype`, in float32."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype).float())
    return model


def train_half(
    model: torch.nn.Module,
    dtype: torch.dtype,
    batches: Sequence[Batch],
    loss_of: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    rate: float,
    loss_scaling: float = 1.0,
    masters: bool = False,
) -> Reference:
    """Train a model that computes in `dtype` and whose weights are rounded to it after each step.

    Gradients are unscaled, clipped to the norm 1 and used in float32, on float32 moments. The rest
    is as in `tests.modelling.torch_training.train`, to which this comes down for float32.

    Args:
        model: with weights of `dtype` in float32 (see `rounded`); it is converted.
        loss_of: the model's loss of a batch.
        masters: whether the float32 weights stay as the optimizer leaves them; those are returned.
    """
    model.to(dtype)
    halves = dict(model.named_parameters())
    wide = {n: torch.nn.Parameter(p.detach().float()) for n, p in halves.items()}
    groups = [
        {"params": [p for p in wide.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in wide.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-6)
    losses, norms, gradients = [], [], {}
    for batch in batches:
        loss = loss_of({n: torch.tensor(a).long() for n, a in batch.items()})
        model.zero_grad()
        (loss * loss_scaling).backward()
        for name, p in halves.items():
            assert p.grad is not None
            wide[name].grad = p.grad.float() / loss_scaling
        gradients = gradients or {n: p.grad.numpy().copy() for n, p in wide.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(wide.values(), 1.0).item())
        optimizer.step()
        with torch.no_grad():
            for name, p in halves.items():
                p.copy_(wide[name])
                if not masters:
                    wide[name].copy_(p)
        losses.append(loss.item())
    return Reference(losses, norms, gradients, {n: as_array(p) for n, p in wide.items()}, {})


def as_array(p: torch.Tensor) -> np.ndarray:
    """A copy in float32."""
    return p.detach().float().numpy().copy()
