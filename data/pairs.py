"""Examples as token arrays for an encoder-decoder model, with Hugging Face's names.

Batches are dicts of int32 arrays:
    input_ids, attention_mask          [n, sequence_length], padded on the right, mask 1 = token
    decoder_input_ids, labels          [n, decoder_sequence_length]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.lengths import Cuts, LongTargets, fitted_targets
from data.prompts import Prompts
from data.task import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IGNORE_INDEX = -100
"""Label of positions after the target's `</s>`: Hugging Face's value, ignored by the loss."""

CHUNK = 4096
"""Texts given to the tokenizer at once: bounds the memory its Python objects take."""


@dataclass(frozen=True)
class EncodedExamples:
    """Token ids of examples, padded only when a batch is taken: MNLI at length 512 would take GB.

    Attributes:
        tokens: int32, the prompts' ids one after the other, each ended by `</s>`.
        starts: int64 [n + 1], where each prompt starts in `tokens`, and where the last one ends.
        targets: int32 [n, decoder_sequence_length], padded with `IGNORE_INDEX`.
        sequence_length: length that prompts are padded to.
        pad: id of the padding token, which also starts decoding.
        cuts: what was cut or dropped; prompts lose their end, `</s>` kept.
    """

    tokens: np.ndarray
    starts: np.ndarray
    targets: np.ndarray
    sequence_length: int
    pad: int
    cuts: Cuts = Cuts()  # noqa: RUF009 - frozen

    def __len__(self) -> int:
        return len(self.targets)

    def prompt(self, index: int) -> np.ndarray:
        """The prompt's ids, not padded."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The batch of the examples at `indices`, in their order."""
        rows = np.asarray(indices, np.int64)
        input_ids = np.full((len(rows), self.sequence_length), self.pad, np.int32)
        attention_mask = np.zeros_like(input_ids)
        for i, row in enumerate(rows):
            ids = self.prompt(row)
            input_ids[i, : len(ids)] = ids
            attention_mask[i, : len(ids)] = 1
        labels = self.targets[rows]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": shift_right(labels, self.pad),
            "labels": labels,
        }


def encode(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    decoder_sequence_length: int,
    long_targets: LongTargets = "refuse",
) -> EncodedExamples:
    """Tokenise prompts and targets. Prompts longer than `sequence_length` are cut and counted.

    Args:
        long_targets: what becomes of targets longer than `decoder_sequence_length`.

    Raises:
        ValueError: a target does not fit, and `long_targets` is "refuse"; a target that was cut
            would train the model to say something else.
    """
    kept, targets, cuts = fitted_targets(
        target_ids([example.target for example in examples], tokenizer),
        [example.target for example in examples],
        decoder_sequence_length,
        long_targets,
        "decoder_sequence_length",
    )
    labels = np.full((len(kept), decoder_sequence_length), IGNORE_INDEX, np.int32)
    for row, ids in zip(labels, targets, strict=True):
        row[: len(ids)] = ids
    prompts, cut = _prompts([examples[i].prompt for i in kept], tokenizer, sequence_length)
    return EncodedExamples(
        tokens=np.concatenate([np.zeros(0, np.int32), *prompts]),
        starts=np.cumsum([0, *map(len, prompts)]),
        targets=labels,
        sequence_length=sequence_length,
        pad=tokenizer.pad_token_id,
        cuts=cuts + Cuts(prompts=cut),
    )


def padded_prompts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, sequence_length: int, multiple: int
) -> Prompts:
    """Prompts padded to the longest, cut to `sequence_length` as `encode` cuts them.

    Args:
        multiple: the length they are padded to is a multiple of it, if that is short enough.
    """
    rows, cut = _prompts(texts, tokenizer, sequence_length)
    longest = max(map(len, rows), default=1)
    length = min(-(-longest // multiple) * multiple, sequence_length)
    words = np.full((len(rows), length), tokenizer.pad_token_id, np.int32)
    mask = np.zeros_like(words)
    for i, ids in enumerate(rows):
        words[i, : len(ids)], mask[i, : len(ids)] = ids, 1
    return Prompts(texts, words, mask, cut)


def target_ids(targets: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[np.ndarray]:
    """The tokens of each target, `</s>` included; equal ones are tokenised once."""
    known: dict[str, np.ndarray] = {}
    for start in range(0, len(targets), CHUNK):
        chunk = targets[start : start + CHUNK]
        new = [text for text in dict.fromkeys(chunk) if text not in known]
        if new:
            found = tokenizer(new, verbose=False)["input_ids"]
            known |= {text: np.asarray(ids, np.int32) for text, ids in zip(new, found, strict=True)}
        yield from (known[text] for text in chunk)


def shift_right(labels: np.ndarray, pad: int) -> np.ndarray:
    """What the decoder reads to predict `labels` [n, length]: each position's predecessor.

    The first is `pad`, as in T5; ignored positions become `pad` too.
    """
    shifted = np.full_like(labels, pad)
    shifted[:, 1:] = labels[:, :-1]
    return np.where(shifted == IGNORE_INDEX, pad, shifted)


def _prompts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, length: int
) -> tuple[list[np.ndarray], int]:
    """The ids of each text, at most `length`, and how many were cut to that."""
    rows: list[np.ndarray] = []
    cut = 0
    for start in range(0, len(texts), CHUNK):
        for ids in tokenizer(list(texts[start : start + CHUNK]), verbose=False)["input_ids"]:
            if len(ids) > length:
                cut += 1
                ids = [*ids[: length - 1], tokenizer.eos_token_id]
            rows.append(np.asarray(ids, np.int32))
    return rows, cut
