"""Reference models: transformers on PyTorch, with given weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from config.errors import UserError
from huggingface.pytorch_bin_files import has_torch as has_torch

NEEDS_TORCH = (
    "Hugging Face's model runs on torch, which is not installed: "
    "pip install -r requirements-dev.txt"
)


def require_torch() -> None:
    """Raise UserError unless PyTorch is installed."""
    if not has_torch():
        raise UserError(NEEDS_TORCH)


def build_torch_model(
    hf_config: Mapping[str, Any], dtype: str, weights: Mapping[str, np.ndarray]
) -> Any:
    """Build a transformers model from weights, in evaluation mode.

    It is made as `from_pretrained` makes it from the files of --save-hf, without the files.

    Args:
        hf_config: content of its config.json.
        dtype: name of the type it computes in.
        weights: whole weights by Hugging Face name, any floating-point type; each is read once and
            copied.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()  # it warns of weights that are not tied
    transformers.utils.logging.disable_progress_bar()
    architecture = getattr(transformers, hf_config["architectures"][0])
    precision = getattr(torch, dtype)
    # Through float32, which holds every value of the types that torch does not take from NumPy.
    state = {
        name: torch.tensor(np.asarray(weights[name], np.float32)).to(precision) for name in weights
    }
    model, report = architecture.from_pretrained(
        None,
        config=architecture.config_class.from_dict(dict(hf_config)),
        state_dict=state,
        dtype=precision,
        output_loading_info=True,
    )
    assert not report["missing_keys"], f"we have no {report['missing_keys']}"
    return model.eval()


def generate_greedily(
    model: Any,
    input_ids: np.ndarray,
    max_new_tokens: int,
    mask: np.ndarray | None = None,
    **settings: Any,
) -> np.ndarray:
    """Generate greedily with a PyTorch model; returns token ids.

    Args:
        input_ids: int [n, prompt length].
        max_new_tokens: of new tokens, at most.
        mask: same shape, 1 where there is a token; by default everywhere. A language model without
            an encoder wants its padding on the left, unlike ours.
        settings: further arguments of transformers' `generate`.

    Returns:
        int [n, up to length], the new tokens; padding after a row's end token.
    """
    import torch

    prompt_ids = torch.as_tensor(input_ids).long()
    attention_mask = torch.ones_like(prompt_ids) if mask is None else torch.as_tensor(mask).long()
    with torch.inference_mode():
        tokens = model.generate(
            input_ids=prompt_ids,
            attention_mask=attention_mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            **settings,
        )
    # A decoder's output begins with the start token, a language model's with the prompt.
    return tokens[:, 1 if model.config.is_encoder_decoder else prompt_ids.shape[1] :].numpy()
