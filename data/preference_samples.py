"""Samples of preference pairs, for DPO, KTO and related objectives.

The texts of a pair are a chosen and a rejected answer; or, where rows say of single answers whether
they are liked, the answer, and another prompt's answer to the same prompt, which tells how far a
model is from its reference. Both are in one sample: as two texts with segments, or, in an
encoder-decoder, as two targets of one prompt.

Batches have besides the arrays of their shape, float32, with a row for each pair:
    num_loss_tokens   [pairs, 2]   tokens of each answer that count in the loss; 0: no pair
    kto_labels        [pairs, 1]   1: desirable, -1: undesirable; of unpaired preferences alone
    ref_logps         [pairs, 2]   log-probability of each answer by the reference model, if any
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.examples import Example, TokenizedText
from data.packing import EMPTY_SLOT
from data.samples import ExtendedSamples

NUM_LOSS_TOKENS, KTO_LABELS = "num_loss_tokens", "kto_labels"
REF_LOGPS, SEGMENT_IDS = "ref_logps", "segment_ids"


@dataclass(frozen=True)
class PreferencePair:
    """A preference pair: two tokenized answers to compare, and the index of their example."""

    sequences: tuple[TokenizedText, TokenizedText]
    examples: tuple[Example, Example]
    example_index: int

    @classmethod
    def from_examples(
        cls, examples: Sequence[Example], tokens: Sequence[TokenizedText], unpaired: bool
    ) -> list[PreferencePair]:
        """Pair adjacent examples, or each example with another prompt's answer (KTO)."""
        if not unpaired:
            return [
                cls((tokens[i], tokens[i + 1]), (examples[i], examples[i + 1]), i)
                for i in range(0, len(examples), 2)
            ]
        return [
            cls(
                (tokens[i], _combine_prompt_and_answer(tokens[i], tokens[j])),
                (examples[i], examples[j]),
                i,
            )
            for i, j in enumerate(
                _assign_mismatched_answers([example.prompt for example in examples])
            )
        ]


def _assign_mismatched_answers(prompts: Sequence[str]) -> list[int]:
    """Choose the index of another prompt's answer for each prompt, for KTO's KL term.

    Every answer is used once if all prompts have equally many; if all prompts are equal, the next
    answer is used.
    """
    indices_by_prompt = dict[str, list[int]]()
    for index, prompt in enumerate(prompts):
        indices_by_prompt.setdefault(prompt, []).append(index)
    ordered = [i for indices in indices_by_prompt.values() for i in indices]
    matches = [0] * len(prompts)
    end = 0
    for indices in indices_by_prompt.values():
        end += len(indices)
        num_others = len(prompts) - len(indices)
        for number, index in enumerate(indices):
            distance = number % num_others if num_others else number + 1
            matches[index] = ordered[(end + distance) % len(prompts)]
    return matches


def count_equal_pairs(examples: Sequence[Example]) -> int:
    """Count the preference pairs whose two answers are equal."""
    return sum(
        chosen == rejected for chosen, rejected in zip(examples[::2], examples[1::2], strict=True)
    )


def count_prompt_tokens(text: TokenizedText) -> int:
    """Number of prompt tokens in a sequence: the index of the first loss token."""
    return int(np.argmax(text.loss_mask)) if text.loss_mask.any() else len(text.ids)


def _combine_prompt_and_answer(
    prompt_source: TokenizedText, answer_source: TokenizedText
) -> TokenizedText:
    """Combine one tokenized sequence's prompt with another's answer."""
    prompt = slice(None, count_prompt_tokens(prompt_source))
    answer = slice(count_prompt_tokens(answer_source), None)
    ids, masks = zip(prompt_source, answer_source, strict=True)
    return TokenizedText(np.concatenate([ids[0][prompt], ids[1][answer]]),
                  np.concatenate([masks[0][prompt], masks[1][answer]]))  # fmt: skip


def make_kto_labels(pairs: Sequence[PreferencePair]) -> np.ndarray | None:
    """KTO labels, float32 [n, 1]: 1 desirable, -1 undesirable; None for unlabeled pairs."""
    if any(pair.examples[0].desirable is None for pair in pairs):
        return None
    return np.asarray([[1 if pair.examples[0].desirable else -1] for pair in pairs], np.float32)


@dataclass(frozen=True)
class PreferenceSamples(ExtendedSamples):
    """Samples of preference pairs: chosen and rejected sequences of the same prompt.

    Attributes:
        samples: those with the pairs' tokens.
        pair_indices: int64 [n, pairs per sample], index of the pair in each slot, or `EMPTY_SLOT`.
        num_loss_tokens: float32 [pairs, 2], loss tokens of each answer.
        kto_labels: float32 [pairs, 1], 1 desirable, -1 undesirable; None without labels.
    """

    pair_indices: np.ndarray
    num_loss_tokens: np.ndarray
    kto_labels: np.ndarray | None

    @property
    def digest(self) -> str:
        kto_labels = np.zeros(0) if self.kto_labels is None else self.kto_labels
        return self.hash_with(self.pair_indices, self.num_loss_tokens, kto_labels)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: arrays by name."""
        rows = np.asarray(indices, np.int64)
        pairs = self.pair_indices[rows].reshape(-1)
        is_used = (pairs != EMPTY_SLOT)[:, None]
        batch = self.samples.take(rows) | {
            NUM_LOSS_TOKENS: np.where(is_used, self.num_loss_tokens[pairs], 0)
        }
        if self.kto_labels is not None:
            batch[KTO_LABELS] = np.where(is_used, self.kto_labels[pairs], 1)
        return batch


@dataclass(frozen=True)
class SamplesWithRefLogps(ExtendedSamples):
    """Preference samples with the reference model's log-probabilities.

    Attributes:
        ref_logps: float32 [n, pairs per sample, 2], reference log-probabilities; 0 in empty slots.
    """

    ref_logps: np.ndarray

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = self.samples.take(indices)
        return batch | {REF_LOGPS: self.ref_logps[np.asarray(indices, np.int64)].reshape(-1, 2)}
