"""Training of Hugging Face's model on torch: what benchmarks compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from config.sections import Optimizer, RunConfig
from data.samples import IGNORE_INDEX, Batch
from huggingface.torch_model import model_of
from modelling.spec import family_of


class TorchTraining:
    """Optimizer steps: the same loss, clipping and AdamW as ours, on one micro-batch.

    Args:
        checkpointing: compute each layer's activations again in the backward pass.
    """

    def __init__(
        self, config: RunConfig, weights: Mapping[str, np.ndarray], checkpointing: bool
    ) -> None:
        family = family_of(config)
        files = family.weight_map(config).to_hf(weights)
        self.model = model_of(family.to_config_json(config), config.model.precision, files)
        if checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
            self.model.train()  # checkpointing works in this mode only; dropout is 0
            for module in self.model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        optimizer = config.training.optimizer
        self.clip = optimizer.gradient_clipping
        self.optimizer = torch.optim.AdamW(
            _decayed_apart(self.model, optimizer),
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            foreach=True,
        )

    def step(self, batch: Batch, learning_rate: float) -> float:
        """One optimizer step; returns the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean over the target tokens. Labels stand where they are predicted, for all families."""
        arrays = {n: torch.from_numpy(np.ascontiguousarray(a)).long() for n, a in batch.items()}
        labels = arrays.pop("labels")
        if "segment_ids" in arrays:  # of one text each: a mask of its tokens
            arrays["attention_mask"] = arrays.pop("segment_ids")
        logits = self.model(**arrays, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
        )


def _decayed_apart(model: Any, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Parameters in two groups: vectors, such as norms' scales, have no weight decay."""
    parameters = list(model.parameters())
    return [
        {
            "params": [p for p in parameters if (p.ndim > 1) == decayed],
            "weight_decay": optimizer.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
