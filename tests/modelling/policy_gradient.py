"""Policy gradients by TRL's own losses in float64, on the models of transformers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from config.sections import RunConfig
from config.training import Training
from data.examples import Example, TokenizedText
from data.rollout import Rollout
from data.rollout_samples import (
    OLD_LOGPS,
    REF_LOGPS,
    RolloutSamples,
    TokenizedRollout,
    tokenize_rollouts,
)
from data.sample_format import SampleFormat
from data.samples import IGNORE_INDEX, Batch

EOS = 3


class Scored(NamedTuple):
    """Per-token log-probabilities and entropies of the completions of a batch, [n, length]."""

    logps: torch.Tensor
    entropies: torch.Tensor
    mask: torch.Tensor


Logits = Callable[[Mapping[str, torch.Tensor], int], list[torch.Tensor]]
"""The logits of each sequence of a batch that precede its labels, and the labels: pairs."""


def random_examples(count: int, vocabulary: int, longest: int, groups: int = 4) -> list[Example]:
    """Rollouts of random tokens and rewards; some are truncated, one has no reward.

    Prompts have two tokens or more: attention to a single one has no gradient, of whose rounding
    AdamW makes steps where all other completions of a batch are clipped.
    """
    rng = np.random.default_rng(5)
    prompts = [rng.integers(EOS, vocabulary, rng.integers(2, 5)).tolist() for _ in range(groups)]
    examples = []
    for index in range(count):
        completion = rng.integers(EOS + 1, vocabulary, rng.integers(1, longest)).tolist()
        completion += [] if rng.random() < 0.2 else [EOS]
        reward = float("nan") if index == 3 else float(rng.normal())
        group = int(rng.integers(groups))
        rollout = Rollout(reward, str(group), None, None, (*prompts[group],), (*completion,))
        examples.append(Example("", "", rollout=rollout))
    return examples


def random_rollouts(config: RunConfig, examples: Sequence[Example]) -> list[TokenizedRollout]:
    def text(example: Example) -> TokenizedText:
        assert example.rollout is not None
        prompt, completion = example.rollout.prompt_ids, example.rollout.completion_ids
        ids = np.asarray([*prompt, *completion], np.int32)
        return TokenizedText(ids, np.arange(len(ids)) >= len(prompt))

    masks = config.training.masks_truncated_completions
    return tokenize_rollouts(examples, list(map(text, examples)), EOS, 1000, masks)


def batches_of(
    config: RunConfig, sample_format: SampleFormat, examples: Sequence[Example], old: Any, ref: Any,
    count: int,
) -> tuple[RolloutSamples, list[Batch]]:  # fmt: skip
    """Global batches with log-probabilities by two functions of batches; and the samples."""
    tokenizer: Any = SimpleNamespace(
        pad_token_id=config.model.pad_token_id,
        affix_ids=((), ()),
        num_end_tokens=1,
        count_leading_special_tokens=lambda ids: 0,
    )
    rollouts = random_rollouts(config, examples)
    samples = sample_format.make_rollout_samples(config, rollouts, examples, tokenizer)
    size = config.training.global_batch_size
    assert len(samples) >= size * count
    rows = np.arange(len(samples))
    whole = samples.take(rows)
    by_name = {OLD_LOGPS: old(whole), REF_LOGPS: ref(whole)}
    if config.training.objective == "rloo" and config.training.resolved_beta:
        in_loss = whole["labels"] != IGNORE_INDEX
        samples = samples.with_kl_penalty((by_name[OLD_LOGPS] - by_name[REF_LOGPS])[in_loss])
    batches = []
    for i in range(count):
        chosen = rows[i * size : (i + 1) * size]
        per_sample = {n: x.reshape(len(rows), -1, x.shape[-1])[chosen] for n, x in by_name.items()}
        arrays = {n: x.reshape(-1, x.shape[-1]) for n, x in per_sample.items()}
        batches.append(samples.take(chosen) | arrays)
    return samples, batches


def decoder_sequences(model: Any, temperature: float = 1.0) -> Any:
    """Of a decoder: the logits before each label, and the labels, of each sequence of a batch."""

    def sequences(batch: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        places = len(batch["num_loss_tokens"]) // len(batch["input_ids"])
        found = []
        rows = zip(batch["input_ids"], batch["labels"], batch["segment_ids"], strict=True)
        for input_ids, labels, numbers in rows:
            for number in range(1, places + 1):
                own = numbers == number
                if own.any():
                    logits = model(input_ids=input_ids[own].long()[None]).logits[0].double()
                    found.append((logits / temperature, labels[own].long()))
        return found

    return sequences


def t5_sequences(model: Any, temperature: float = 1.0) -> Any:
    """Of an encoder-decoder."""

    def sequences(batch: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        places, found = len(batch["labels"]) // len(batch["input_ids"]), []
        for row, labels in enumerate(batch["labels"]):
            sample, place = divmod(row, places)
            own = batch["segment_ids"][sample] == place + 1
            if not own.any():
                continue
            prompt = batch["input_ids"][sample][own].long()[None]
            read = batch["decoder_input_ids"][row].long()[None]
            logits = model(input_ids=prompt, decoder_input_ids=read).logits[0].double()
            found.append((logits / temperature, labels.long()))
        return found

    return sequences


def scored(sequences: list[tuple[torch.Tensor, torch.Tensor]]) -> Scored:
    """Log-probabilities and entropies of the labels, padded on the right."""
    longest = max(int((labels >= 0).sum()) for _, labels in sequences)
    rows = []
    for logits, labels in sequences:
        there = labels >= 0
        logps = torch.log_softmax(logits[there], -1)
        chosen = logps.gather(1, labels[there][:, None])[:, 0]
        entropy = -(logps.exp() * logps).sum(-1)
        pad = (0, longest - int(there.sum()))
        mask = torch.ones_like(chosen)
        rows.append([torch.nn.functional.pad(t, pad) for t in (chosen, entropy, mask)])
    return Scored(*(torch.stack(column) for column in zip(*rows, strict=True)))


def labels_logps(sequences_of: Any) -> Callable[[Batch], np.ndarray]:
    """Log-probabilities at the labels of a batch, in their shape, float32."""

    def logps(batch: Batch) -> np.ndarray:
        with torch.no_grad():
            found = sequences_of({n: torch.tensor(x) for n, x in batch.items()})
            out = np.zeros(batch["labels"].shape, np.float32)
            values = [
                torch.log_softmax(logits[labels >= 0], -1)
                .gather(1, labels[labels >= 0][:, None])[:, 0]
                for logits, labels in found
            ]  # fmt: skip
            out[batch["labels"] != IGNORE_INDEX] = torch.cat(values).numpy()
        return out

    return logps


def padded(values: np.ndarray, mask: torch.Tensor) -> torch.Tensor:
    """The values of all labels, in order, padded as a mask is."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    out[mask.bool()] = torch.tensor(values.astype(np.float64))
    return out


def trl_loss(
    training: Training, policy: Scored, batch: Batch
) -> tuple[torch.Tensor, dict[str, float]]:
    """TRL's loss of a global batch, and its metrics."""
    present = batch["completion_lengths"][:, 0] > 0
    in_loss = batch["labels"] != IGNORE_INDEX
    old = padded(batch[OLD_LOGPS][in_loss], policy.mask)
    is_rloo = training.objective == "rloo"
    mask = policy.mask
    empty = torch.zeros(len(mask), 0, dtype=torch.long)
    inputs: dict[str, Any] = {
        "prompt_ids": empty, "prompt_mask": empty, "completion_ids": mask, "completion_mask": mask,
        "advantages": torch.tensor(batch["advantages"][present, 0].astype(np.float64)),
        "old_per_token_logps": old, "old_logps": (old * mask).sum(1),
        "ref_per_token_logps": padded(batch[REF_LOGPS][in_loss], mask),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    names = {"gspo": "grpo"}
    trainer = SimpleNamespace(
        loss_type=names.get(training.objective, training.objective),
        importance_sampling_level="sequence" if training.objective == "gspo" else "token",
        beta=training.resolved_beta, epsilon_low=training.epsilon,
        epsilon_high=training.resolved_epsilon_high,
        max_completion_length=training.max_completion_length,
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        vllm_importance_sampling_correction=False, aux_loss_enabled=False,
        _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda t, reduction: t, gather=lambda t: t
        ),
        _get_per_token_logps_and_entropies=lambda *a, **k: (policy.logps, policy.entropies, None),
    )  # fmt: skip
    of = RLOOTrainer if is_rloo else GRPOTrainer
    loss: torch.Tensor = of._compute_loss(trainer, None, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}
