"""Sample completions of prompts with vLLM, score them, and write them as rollouts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def reward(completion: str, row: dict) -> float:
    """Score a completion: here 1 if it is the row's answer."""
    return float(completion.strip() == row["answer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path, help="rows with messages in prompt, and answer")
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--adapter")
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    model = LLM(args.model, enable_lora=args.adapter is not None, max_lora_rank=16)
    params = SamplingParams(
        n=args.num_generations, max_tokens=args.max_tokens, logprobs=0, seed=args.seed
    )
    adapter = LoRARequest("policy", 1, args.adapter) if args.adapter else None
    outputs = model.chat([row["prompt"] for row in rows], params, lora_request=adapter)
    with args.rollouts.open("w") as file:
        for group, (row, output) in enumerate(zip(rows, outputs, strict=True)):
            for completion in output.outputs:
                ids = list(completion.token_ids)
                steps = zip(completion.logprobs, ids, strict=True)
                rollout = {
                    "prompt_ids": list(output.prompt_token_ids),
                    "completion_ids": ids,
                    "logprobs": [step[token].logprob for step, token in steps],
                    "finish_reason": completion.finish_reason,
                    "reward": reward(completion.text, row),
                    "group": group,
                }
                file.write(json.dumps(rollout) + "\n")


if __name__ == "__main__":
    main()
