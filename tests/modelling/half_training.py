"""Training in float16 or bfloat16 in torch, with float32 moments, as ours does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from config.presets import load_config
from config.sections import RunConfig
from config.t5 import T5Config
from tests.modelling.gptj import training as gptj
from tests.modelling.gptj.hf import hf_model, small_config
from tests.modelling.t5 import training as t5
from tests.modelling.t5.hf import hf_model as hf_t5
from tests.modelling.torch_training import Batch, Reference, named_by_hf


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


STEPS = 5
LOSS_SCALING = {"float32": 1.0, "bfloat16": 1.0, "float16": 128.0}
Arrays = Mapping[str, np.ndarray]
Loss = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def t5_loss(model: torch.nn.Module) -> Loss:
    return lambda batch: model(**named_by_hf(batch)).loss


def gptj_loss(model: torch.nn.Module) -> Loss:
    """Its own loss would shift the labels, which the data have done."""

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"]).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return loss


@dataclass(frozen=True)
class Family:
    """Hugging Face's model, its loss, the data, and our configuration for dp × tp."""

    model: Callable[[], torch.nn.Module]
    loss: Callable[[torch.nn.Module], Loss]
    batches: Callable[[int], list[Batch]]
    config: Callable[[int, int], RunConfig]
    rate: float = 1e-2


def small_t5(dp: int = 1, tp: int = 1) -> T5Config:
    """3 layers of google/flan-t5-small's shape, a smaller vocabulary; 16 samples of 16 tokens."""
    samples = 16
    overrides = {
        "model": {
            "layers": 3,
            "sequence_length": 16,
            "decoder_sequence_length": 6,
            "embedding": {"vocab_size": 1024},
        },
        "training": {
            "global_batch_size": samples,
            "optimizer": {"eps": 1e-6, "weight_decay": 0.1, "gradient_clipping": 1.0},
        },
        "execution": {
            "micro_batch_size": samples // (2 * dp),
            "data_parallel": dp,
            "tensor_parallel": tp,
            "device": "cpu",
        },
    }
    return load_config(T5Config, "finetuning", "small", overrides)


def their_small_t5() -> torch.nn.Module:
    """Hugging Face's, with logits of variance 1."""
    model = hf_t5(small_t5(), spread=0.005)
    with torch.no_grad():
        model.lm_head.weight /= model.config.d_model**0.5
    return model


FAMILIES = {
    "t5": Family(t5.their_model, t5_loss, t5.batches, t5.our_config),
    "gptj": Family(lambda: hf_model(small_config()), gptj_loss, gptj.batches, small_config),
    "small": Family(
        their_small_t5, t5_loss, lambda count: t5.batches(count, small_t5()), small_t5, 1e-3
    ),
}


def in_precision(config: RunConfig, precision: str, **changes: Mapping[str, object]) -> RunConfig:
    """Returns a configuration with another precision and `changes` by section."""
    data = config.to_dict()
    data["model"]["precision"] = precision
    data["execution"]["loss_scaling"] = LOSS_SCALING[precision]
    for section, values in changes.items():
        data[section] |= values
    return type(config).from_dict(data)


def error(found: Arrays, exact: Arrays) -> float:
    """The norm of the error of all arrays together, relative to the norm of all."""
    assert found.keys() == exact.keys()
    wrong = sum(float(np.sum((a.astype(np.float64) - exact[n]) ** 2)) for n, a in found.items())
    whole = sum(float(np.sum(a.astype(np.float64) ** 2)) for a in exact.values())
    return float(np.sqrt(wrong / whole))
