"""Adapters of `peft` on Hugging Face's models in torch, as the reference for ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import peft
import torch

from tests.modelling.torch_training import Reference

PREFIX = "base_model.model."


def with_peft(model: torch.nn.Module, **settings: Any) -> peft.PeftModel:
    """A model with adapters, none of whose matrices is zero, so that all have gradients."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return adapted.eval()


class Turned(torch.nn.Module):
    """A linear map by the transpose of a matrix that another module has."""

    def __init__(self, matrix: torch.nn.Parameter) -> None:
        super().__init__()
        self.matrix = matrix

    @property
    def weight(self) -> torch.Tensor:
        return self.matrix.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def tie_adapters(model: peft.PeftModel) -> None:
    """Give all embeddings and the head the adapter of the first embedding, as PEFT's
    `ensure_weight_tying` means it, with one gradient."""
    modules: list[Any] = [m for m in model.modules() if getattr(m, "lora_embedding_A", None)]
    first = modules[0]
    a, b = first.lora_embedding_A, first.lora_embedding_B
    for other in modules[1:]:
        other.lora_embedding_A["default"], other.lora_embedding_B["default"] = (
            a["default"],
            b["default"],
        )
    head: Any = model.base_model.model.lm_head
    if hasattr(head, "lora_A"):
        head.lora_A["default"], head.lora_B["default"] = Turned(b["default"]), Turned(a["default"])


def own_name(name: str) -> str:
    """The name of a parameter in files, without PEFT's prefix."""
    for part in (
        ".token_adapter.base_layer",
        ".original_module",
        ".modules_to_save.default",
        ".default",
    ):
        name = name.replace(part, "")
    name = re.sub(r"\.base_layer(?!(\.base_layer)*\.lora_)", "", name)  # files of experts have it
    name = name.replace("magnitude_vector.weight", "magnitude_vector")
    return name.removeprefix(PREFIX)


def named(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of a model's parameters by the names in files; of a module that is trained whole, the
    copy that is trained."""
    return {own_name(name): arrays[name] for name in arrays if ".original_module" not in name}


def renamed(found: Reference) -> Reference:
    """Renames the results of training to the names in files."""
    return Reference(
        found.losses, found.norms, named(found.gradients), named(found.weights), found.state
    )
