"""Samples of rollouts, for policy gradients.

A batch has besides the arrays of its format, float32 with a row for each sequence, [sequences, 1]:
    advantages, num_loss_tokens    of a completion; 0: no rollout
    rewards                        NaN: not scored
    completion_lengths             tokens of a completion, also outside the loss; 0: no rollout
    is_truncated                   1: without an end token
    has_equal_rewards              1: all rewards of its group are equal
and for each token, [sequences, length], 0 where there is no label:
    old_per_token_logps            log-probability of the label by the policy that wrote it
    ref_per_token_logps            by the model that training starts with, if it is used
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from data.advantages import (
    assign_group_ids,
    group_relative_advantages,
    group_stds,
    leave_one_out_advantages,
)
from data.examples import Example, TokenizedText
from data.packing import EMPTY_SLOT
from data.preference_samples import NUM_LOSS_TOKENS
from data.samples import ExtendedSamples, Samples
from data.truncation import ExampleError, TokenLimit, TruncationCounts

if TYPE_CHECKING:
    from config.training import Training

ADVANTAGES, REWARDS, COMPLETION_LENGTHS = "advantages", "rewards", "completion_lengths"
IS_TRUNCATED, HAS_EQUAL_REWARDS = "is_truncated", "has_equal_rewards"
OLD_LOGPS, REF_LOGPS = "old_per_token_logps", "ref_per_token_logps"

_LOGP = np.dtype([(OLD_LOGPS, "<f4")])


@dataclass(frozen=True)
class TokenizedRollout:
    """A tokenized rollout.

    Attributes:
        sequences: its only sequence: prompt and completion, this in the loss if it is to count.
        example, example_index: the example, and its index.
        is_truncated: True if the completion has no end token.
        completion_length: tokens of the completion, also outside the loss.
        old_logps: float32 [loss tokens], as the row says; None: unknown.
    """

    sequences: tuple[TokenizedText]
    example: Example
    example_index: int
    is_truncated: bool
    completion_length: int
    old_logps: np.ndarray | None


def tokenize_from_ids(example: Example) -> TokenizedText | None:
    """Token ids of a rollout whose row has them; None for other examples."""
    rollout = example.rollout
    if rollout is None or not example.has_token_ids:
        return None
    ids = np.asarray([*rollout.prompt_ids, *rollout.completion_ids], np.int32)
    return TokenizedText(ids, np.arange(len(ids)) >= len(rollout.prompt_ids))


def tokenize_rollouts(
    examples: Sequence[Example],
    tokens: Sequence[TokenizedText],
    eos_token_id: int,
    vocab_size: int,
    masks_truncated: bool,
) -> list[TokenizedRollout]:
    """Complete tokenized examples to rollouts.

    Args:
        vocab_size: token ids are below it.
        masks_truncated: completions without an end token are not in the loss.

    Raises:
        ExampleError: log-probabilities or token ids of a row do not fit.
    """
    rollouts = [
        _tokenize_rollout(index, example, text, eos_token_id, masks_truncated)
        for index, (example, text) in enumerate(zip(examples, tokens, strict=True))
    ]
    for rollout in rollouts:
        largest = int(rollout.sequences[0].ids.max(initial=0))
        if largest >= vocab_size:
            raise ExampleError(
                rollout.example_index,
                f"there is a token {largest}, but the model's tokens are below {vocab_size}",
            )
    known = [rollout.old_logps is not None for rollout in rollouts]
    if any(known) and not all(known):
        raise ExampleError(
            known.index(False), "it has no logprobs, but other rows have: give those of all or none"
        )
    return rollouts


def _tokenize_rollout(
    index: int, example: Example, text: TokenizedText, eos_token_id: int, masks_truncated: bool
) -> TokenizedRollout:
    rollout = example.rollout
    assert rollout is not None
    in_loss = np.flatnonzero(text.loss_mask)
    ends = bool(text.ids[in_loss[-1]] == eos_token_id)
    if rollout.completion_ids:
        is_truncated = not ends if rollout.is_truncated is None else rollout.is_truncated
    else:
        is_truncated = bool(rollout.is_truncated)
        if is_truncated and ends:  # the end token is not of the policy, as that of all texts
            text, in_loss = TokenizedText(*(part[: in_loss[-1]] for part in text)), in_loss[:-1]
    length = len(in_loss)
    if not length:
        raise ExampleError(index, "the completion is empty and has no end token: leave the row out")
    if rollout.logprobs is not None and len(rollout.logprobs) != length:
        raise ExampleError(
            index,
            f"it has {len(rollout.logprobs)} logprobs, but its completion has {length} tokens: "
            "give prompt_ids and completion_ids, which are not tokenized again",
        )
    logps = None if rollout.logprobs is None else np.asarray(rollout.logprobs, np.float32)
    if is_truncated and masks_truncated:
        text = TokenizedText(text.ids, np.zeros_like(text.loss_mask))
        logps = None if logps is None else logps[:0]
    return TokenizedRollout((text,), example, index, is_truncated, length, logps)


def truncate_completions(
    rollouts: Sequence[TokenizedRollout], limit: TokenLimit, on_long_target: str
) -> tuple[list[TokenizedRollout], TruncationCounts]:
    """Cut or drop completions that exceed the token limit of an encoder-decoder's targets.

    Raises:
        TooLongError: one is longer, and `on_long_target` is "error".
    """
    too_long = [r for r in rollouts if r.completion_length > limit.tokens]
    if too_long and on_long_target == "error":
        longest = max(too_long, key=lambda r: r.completion_length)
        tokens = longest.completion_length
        raise limit.error(longest.example_index, f"the completion has {tokens} tokens", tokens)
    if on_long_target == "skip":
        kept = [r for r in rollouts if r.completion_length <= limit.tokens]
        return kept, TruncationCounts(dropped=len(too_long))
    return [_truncate_completion(r, limit.tokens) for r in rollouts], TruncationCounts(
        targets=len(too_long)
    )


def _truncate_completion(rollout: TokenizedRollout, max_tokens: int) -> TokenizedRollout:
    excess = max(rollout.completion_length - max_tokens, 0)
    if not excess:
        return rollout
    text = TokenizedText(*(part[: len(part) - excess] for part in rollout.sequences[0]))
    logps = rollout.old_logps
    return replace(
        rollout,
        sequences=(text,),
        old_logps=None if logps is None else logps[: np.count_nonzero(text.loss_mask)],
        completion_length=max_tokens,
        is_truncated=True,
    )


def group_keys(examples: Sequence[Example]) -> list[str]:
    """Key of each rollout's group: that of the row, or the prompt."""
    groups = [example.rollout and example.rollout.group for example in examples]
    pairs = zip(groups, examples, strict=True)
    return [f"prompt {e.prompt}" if group is None else f"group {group}" for group, e in pairs]


@dataclass(frozen=True)
class RolloutSamples(ExtendedSamples):
    """Samples of rollouts with their advantages.

    Attributes:
        samples: those with the rollouts' tokens.
        slots: int64 [n, rollouts per sample], index of the rollout in each slot, or `EMPTY_SLOT`.
        rollouts: those in the samples.
        arrays: float32 [rollouts], by name: the arrays of a batch with a row for each sequence.
        groups: number of each rollout's group, int64 [rollouts].
        training: settings of the advantages.
    """

    slots: np.ndarray
    rollouts: Sequence[TokenizedRollout]
    arrays: dict[str, np.ndarray]
    groups: np.ndarray
    training: Training

    @classmethod
    def from_rollouts(
        cls,
        samples: Samples,
        slots: np.ndarray,
        rollouts: Sequence[TokenizedRollout],
        examples: Sequence[Example],
        training: Training,
    ) -> RolloutSamples:
        """Make samples of the rollouts that fit, with advantages over the examples of all rows."""
        kept = np.asarray([rollout.example_index for rollout in rollouts], np.int64)
        rewards = np.asarray([e.rollout.reward if e.rollout else np.nan for e in examples])
        groups = assign_group_ids(group_keys(examples))
        arrays = {
            ADVANTAGES: _advantages(rewards, groups, training)[kept],
            REWARDS: rewards[kept],
            HAS_EQUAL_REWARDS: np.isclose(group_stds(rewards, groups)[groups], 0)[kept],
            COMPLETION_LENGTHS: np.asarray([r.completion_length for r in rollouts]),
            IS_TRUNCATED: np.asarray([r.is_truncated for r in rollouts]),
            NUM_LOSS_TOKENS: np.asarray(
                [np.count_nonzero(r.sequences[0].loss_mask) for r in rollouts]
            ),
        }
        floats = {name: array.astype(np.float32) for name, array in arrays.items()}
        return cls(samples, slots, rollouts, floats, groups[kept], training)

    @cached_property
    def digest(self) -> str:
        values = [self.arrays[name] for name in sorted(self.arrays)]
        logps = None if self.old_logps is None else self.old_logps.values
        return self.hash_with(self.slots, *values, logps)

    @cached_property
    def old_logps(self) -> InMemoryTokenOutputs | None:
        """Log-probabilities of the loss tokens as the rows say them; None: they do not."""
        if not self.rollouts or self.rollouts[0].old_logps is None:
            return None
        logps = [r.old_logps for r in self.rollouts if r.old_logps is not None]
        values = np.concatenate([np.zeros(0, np.float32), *(logps[i] for i in self._sample_order)])
        return InMemoryTokenOutputs(values.view(_LOGP), self.tokens_per_sample)

    def with_kl_penalty(self, token_kl: np.ndarray) -> RolloutSamples:
        """Copy with RLOO's advantages, whose rewards have a penalty: beta times a KL divergence.

        Args:
            token_kl: of the loss tokens of all samples, in order, float [tokens].
        """
        counts = self.arrays[NUM_LOSS_TOKENS].astype(np.int64)
        ends = np.cumsum(counts[self._sample_order])
        sums = np.diff(np.concatenate([[0.0], np.cumsum(token_kl, dtype=np.float64)])[[0, *ends]])
        penalties = np.zeros(len(counts))
        penalties[self._sample_order] = sums
        rewards = self.arrays[REWARDS].astype(np.float64)
        rewards = rewards - self.training.resolved_beta * penalties
        advantages = _advantages(rewards, self.groups, self.training)
        return replace(self, arrays=self.arrays | {ADVANTAGES: advantages.astype(np.float32)})

    @property
    def _sample_order(self) -> np.ndarray:
        """Indices of the rollouts in the order of the samples, int64 [rollouts]."""
        indices: np.ndarray = self.slots[self.slots != EMPTY_SLOT]
        return indices

    @property
    def tokens_per_sample(self) -> np.ndarray:
        """Number of loss tokens of each sample, int64 [n]."""
        counts = np.append(self.arrays[NUM_LOSS_TOKENS], 0).astype(np.int64)
        return counts[self.slots].sum(axis=1)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: arrays by name."""
        rows = np.asarray(indices, np.int64)
        slots = self.slots[rows].reshape(-1)
        arrays = {
            name: np.where(slots == EMPTY_SLOT, np.float32(0), array[slots])[:, None]
            for name, array in self.arrays.items()
        }
        return self.samples.take(rows) | arrays


@dataclass(frozen=True)
class InMemoryTokenOutputs:
    """Values of all samples' loss tokens, in memory.

    Attributes:
        values: of all samples, one after the other.
        tokens_per_sample: int64 [n].
    """

    values: np.ndarray
    tokens_per_sample: np.ndarray

    def rows(self, samples: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the values of the samples at these indices, one after the other."""
        ends = np.cumsum(self.tokens_per_sample)
        parts = [self.values[ends[i] - self.tokens_per_sample[i] : ends[i]] for i in samples]
        return np.concatenate([self.values[:0], *parts])


def _advantages(rewards: np.ndarray, groups: np.ndarray, training: Training) -> np.ndarray:
    of_group = (
        leave_one_out_advantages if training.objective == "rloo" else group_relative_advantages
    )
    return of_group(rewards, groups, training.resolved_scale_rewards)
