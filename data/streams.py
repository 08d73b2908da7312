"""Examples as texts for a causal language model: packed or padded to train on, prompts to answer.

Batches are dicts of int32 arrays:
    input_ids, labels                  [n, sequence_length], labels being the tokens that follow
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.lengths import Cuts
from data.pairs import CHUNK, IGNORE_INDEX
from data.prompts import Prompts
from data.task import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class PackedTokens:
    """Texts one after the other, cut into samples of equal length: nothing is padded.

    Label and input are the same stream, one token apart, so that each token of it is predicted
    once; the end that fills no sample is left out.

    Attributes:
        tokens: int32, the stream.
        sequence_length: tokens of a sample.
        targets: int32, the tokens to predict, `IGNORE_INDEX` for those that are not learnt;
            None: all of them.
    """

    tokens: np.ndarray
    sequence_length: int
    targets: np.ndarray | None = None

    @property
    def cuts(self) -> Cuts:
        """What was cut: nothing."""
        return Cuts()

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.sequence_length

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The batch of the samples at `indices`, in their order."""
        starts = np.asarray(indices, np.int64).reshape(-1, 1) * self.sequence_length
        positions = starts + np.arange(self.sequence_length)
        targets = self.tokens if self.targets is None else self.targets
        return {"input_ids": self.tokens[positions], "labels": targets[positions + 1]}


@dataclass(frozen=True)
class PaddedTexts:
    """Texts, each a sample of its own, padded on the right when a batch is taken.

    Those too long for a sample lose their beginning: the end holds the answer.

    Attributes:
        tokens: int32, the texts one after the other.
        targets: int32, the same tokens, `IGNORE_INDEX` for those that are not learnt.
        starts: int64 [n + 1], where each text starts in `tokens`, and where the last one ends.
        sequence_length: tokens of a sample.
        pad: id of the padding token.
    """

    tokens: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    sequence_length: int
    pad: int

    @property
    def cuts(self) -> Cuts:
        """How many texts were too long: the last token is predicted, but not read."""
        return Cuts(int(np.count_nonzero(np.diff(self.starts) > self.sequence_length + 1)))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The batch of the texts at `indices`, in their order."""
        rows = np.asarray(indices, np.int64)
        words = np.full((len(rows), self.sequence_length), self.pad, np.int32)
        labels = np.full_like(words, IGNORE_INDEX)
        for i, row in enumerate(rows):
            end = self.starts[row + 1]
            start = max(self.starts[row], end - self.sequence_length - 1)
            words[i, : end - start - 1] = self.tokens[start : end - 1]
            labels[i, : end - start - 1] = self.targets[start + 1 : end]
        return {"input_ids": words, "labels": labels}


def training_text(example: Example, end: str) -> str:
    """A text to learn from: prompt, target and the end token."""
    return f"{example.prompt} {example.target} {end}"


def pack(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    answers_only: bool = False,
) -> PackedTokens:
    """Tokenise the examples' texts and pack them.

    Args:
        answers_only: learn to predict the targets, and not the prompts too.

    Raises:
        ValueError: they do not fill a single sample.
    """
    tokens, targets, _ = _streams(examples, tokenizer, answers_only)
    packed = PackedTokens(tokens, sequence_length, targets if answers_only else None)
    if examples and not len(packed):
        raise ValueError(
            f"the {len(examples)} examples have {len(packed.tokens)} tokens, but a single sample "
            f"takes sequence_length {sequence_length} + 1: give more, or set a smaller one"
        )
    return packed


def pad(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    answers_only: bool = False,
) -> PaddedTexts:
    """Tokenise the examples' texts; each is a sample. `answers_only`: see `pack`."""
    tokens, targets, starts = _streams(examples, tokenizer, answers_only)
    return PaddedTexts(tokens, targets, starts, sequence_length, tokenizer.pad_token_id)


def _streams(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, answers_only: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The texts' tokens one after the other, their targets, and where each text starts."""
    texts = [training_text(example, tokenizer.eos_token) for example in examples]
    rows = list(_tokenised(texts, tokenizer))
    targets = _answers_of(rows, examples, tokenizer) if answers_only else rows
    starts = np.cumsum([0, *map(len, rows)])
    none = np.zeros(0, np.int32)
    return np.concatenate([none, *rows]), np.concatenate([none, *targets]), starts


def _answers_of(
    rows: Sequence[np.ndarray], examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast
) -> list[np.ndarray]:
    """Each text's tokens, with the prompt's tokens ignored."""
    prompts = _tokenised([example.prompt for example in examples], tokenizer)
    targets = [row.copy() for row in rows]
    for row, prompt in zip(targets, prompts, strict=True):
        row[: len(prompt)] = IGNORE_INDEX
    return targets


def prompts_of(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, sequence_length: int, multiple: int
) -> Prompts:
    """Prompts, padded to the longest.

    Those longer than `sequence_length` lose their beginning: the end asks for the answer. An empty
    one becomes the end token, with which texts of the model's training began too.

    Args:
        multiple: the length they are padded to is a multiple of it, if that is short enough.
    """
    start = np.asarray([tokenizer.eos_token_id], np.int32)
    rows = [ids if len(ids) else start for ids in _tokenised(texts, tokenizer)]
    longest = max(map(len, rows), default=1)
    length = min(-(-longest // multiple) * multiple, sequence_length)
    words = np.full((len(rows), length), tokenizer.pad_token_id, np.int32)
    mask = np.zeros_like(words)
    for i, ids in enumerate(rows):
        kept = ids[-length:]
        words[i, : len(kept)], mask[i, : len(kept)] = kept, 1
    return Prompts(texts, words, mask, sum(len(ids) > length for ids in rows))


def answer_ids(targets: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[np.ndarray]:
    """The tokens of each target as a model has to write it, the end token included."""
    return list(_tokenised([f" {text} {tokenizer.eos_token}" for text in targets], tokenizer))


def _tokenised(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[np.ndarray]:
    for start in range(0, len(texts), CHUNK):
        for ids in tokenizer(list(texts[start : start + CHUNK]), verbose=False)["input_ids"]:
            yield np.asarray(ids, np.int32)


def with_extra_tokens(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int
) -> PreTrainedTokenizerFast:
    """The tokenizer with tokens for all rows of the embedding, and one of them for padding.

    GPT-J's embedding has more rows than GPT-2's tokenizer has tokens. The others are called
    `<|extratoken_1|>`, `<|extratoken_2|>`, ...; the first of them is the padding token, unless
    there is one.
    """
    missing = vocab_size - len(tokenizer)
    known = sum(name.startswith("<|extratoken_") for name in tokenizer.get_vocab())
    if missing > 0:
        numbers = range(known + 1, known + missing + 1)
        tokenizer.add_tokens([f"<|extratoken_{number}|>" for number in numbers])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = "<|extratoken_1|>"
    return tokenizer
