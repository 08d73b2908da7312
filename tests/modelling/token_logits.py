"""Logits of the loss tokens of samples by transformers' models, a text at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

TokenLogits = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Returns the logits of a batch's loss tokens in the order of its labels: (tokens, vocabulary)."""


def decoder_token_logits(model: Any) -> TokenLogits:
    """Of a decoder-only model, from texts with segments."""

    def logits(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = zip(batch["input_ids"], batch["labels"], batch["segment_ids"], strict=True)
        found = []
        for input_ids, labels, numbers in rows:
            for number in range(1, int(numbers.max()) + 1):
                own = numbers == number
                of_text = model(input_ids=input_ids[own][None]).logits[0]
                found.append(of_text[labels[own] >= 0])
        return torch.cat(found)

    return logits


def seq2seq_token_logits(model: Any) -> TokenLogits:
    """Of an encoder-decoder, from the targets of each prompt."""

    def logits(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found, each = [], len(batch["labels"]) // len(batch["input_ids"])
        for row, labels in enumerate(batch["labels"]):
            sample, place = divmod(row, each)
            prompt = batch["input_ids"][sample][batch["segment_ids"][sample] == place + 1]
            if (labels >= 0).any():
                read = batch["decoder_input_ids"][row][None]
                of_text = model(input_ids=prompt[None], decoder_input_ids=read).logits[0]
                found.append(of_text[labels >= 0])
        return torch.cat(found)

    return logits
