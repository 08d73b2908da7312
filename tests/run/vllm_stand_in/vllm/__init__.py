"""Stands in for vLLM: as much of its interface as the loop of rollouts uses, on transformers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm.lora.request import LoRARequest

MAX_TOKENS = 12


@dataclass
class SamplingParams:
    n: int
    max_tokens: int
    logprobs: int
    seed: int


class LLM:
    def __init__(self, model: str, enable_lora: bool, max_lora_rank: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._enable_lora = enable_lora

    def chat(
        self, messages: Any, params: SamplingParams, lora_request: LoRARequest | None
    ) -> list[Any]:
        torch.manual_seed(params.seed)
        model = self._model
        if lora_request is not None:
            assert self._enable_lora
            model = PeftModel.from_pretrained(model, lora_request.lora_path)
        found = []
        for prompt in messages:
            text = self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False
            )
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            outputs = [self._sample(model, ids, params.max_tokens) for _ in range(params.n)]
            found.append(SimpleNamespace(prompt_token_ids=ids, outputs=outputs))
        return found

    @torch.no_grad()
    def _sample(self, model: Any, prompt: list[int], max_tokens: int) -> Any:
        ids, logprobs, end = [], [], self._tokenizer.eos_token_id
        while len(ids) < min(max_tokens, MAX_TOKENS) and end not in ids:
            logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, -1]
            logps = torch.log_softmax(logits.float(), -1)
            token = int(torch.multinomial(logps.exp(), 1))
            ids.append(token)
            logprobs.append({token: SimpleNamespace(logprob=float(logps[token]))})
        return SimpleNamespace(
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            token_ids=ids,
            logprobs=logprobs,
            finish_reason="stop" if end in ids else "length",
        )
