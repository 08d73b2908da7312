"""Examples as token arrays for an encoder-decoder model, with Hugging Face's names.

Batches are dicts of int32 arrays:
    input_ids, attention_mask          [n, sequence_length], padded on the right, mask 1 = token
    decoder_input_ids, labels          [n, decoder_sequence_length]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.mnli import LABEL_WORDS, Example, encoder_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IGNORE_INDEX = -100
"""Label of positions after the target's `</s>`: Hugging Face's value, ignored by the loss."""

CHUNK = 4096
"""Prompts given to the tokenizer at once: bounds the memory its Python objects take."""


@dataclass(frozen=True)
class EncodedExamples:
    """Token ids of examples, padded only when a batch is taken: MNLI at length 512 would take GB.

    Attributes:
        tokens: int32, the prompts' ids one after the other, each ended by `</s>`.
        starts: int64 [n + 1], where each prompt starts in `tokens`, and where the last one ends.
        targets: int32 [n, decoder_sequence_length], padded with `IGNORE_INDEX`.
        sequence_length: length that prompts are padded to.
        pad: id of the padding token, which also starts decoding.
        truncated: number of prompts that were longer and lost their end, `</s>` kept.
    """

    tokens: np.ndarray
    starts: np.ndarray
    targets: np.ndarray
    sequence_length: int
    pad: int
    truncated: int

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
) -> EncodedExamples:
    """Tokenise prompts and answers. Prompts longer than `sequence_length` are cut and counted.

    Raises:
        ValueError: an answer does not fit into `decoder_sequence_length`; a cut answer would train
            the model to say something else.
    """
    answers = _answers(tokenizer, decoder_sequence_length)
    prompts: list[np.ndarray] = []
    truncated = 0
    for start in range(0, len(examples), CHUNK):
        texts = [encoder_prompt(example) for example in examples[start : start + CHUNK]]
        for ids in tokenizer(texts, verbose=False)["input_ids"]:
            if len(ids) > sequence_length:
                truncated += 1
                ids = [*ids[: sequence_length - 1], tokenizer.eos_token_id]
            prompts.append(np.asarray(ids, np.int32))
    return EncodedExamples(
        tokens=np.concatenate([np.zeros(0, np.int32), *prompts]),
        starts=np.cumsum([0, *map(len, prompts)]),
        targets=answers[[example.label for example in examples]],
        sequence_length=sequence_length,
        pad=tokenizer.pad_token_id,
        truncated=truncated,
    )


def shift_right(labels: np.ndarray, pad: int) -> np.ndarray:
    """What the decoder reads to predict `labels` [n, length]: each position's predecessor.

    The first is `pad`, as in T5; ignored positions become `pad` too.
    """
    shifted = np.full_like(labels, pad)
    shifted[:, 1:] = labels[:, :-1]
    return np.where(shifted == IGNORE_INDEX, pad, shifted)


def _answers(tokenizer: PreTrainedTokenizerFast, length: int) -> np.ndarray:
    """The tokens of each label's word, `</s>` included: int32 [labels, length]."""
    answers = np.full((len(LABEL_WORDS), length), IGNORE_INDEX, np.int32)
    for row, word in zip(answers, LABEL_WORDS, strict=True):
        ids = tokenizer(word)["input_ids"]
        if len(ids) > length:
            raise ValueError(
                f"the answer {word!r} has {len(ids)} tokens with </s>, but "
                f"decoder_sequence_length is {length}: set it to {len(ids)} or more"
            )
        row[: len(ids)] = ids
    return answers
