"""TruncationCounts of prompts and targets to the lengths of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from config.task import OnLongTarget


@dataclass(frozen=True)
class TruncationCounts:
    """Counts of truncated prompts and targets, and of dropped examples."""

    prompts: int = 0
    targets: int = 0
    dropped: int = 0

    def __add__(self, other: TruncationCounts) -> TruncationCounts:
        return TruncationCounts(
            self.prompts + other.prompts,
            self.targets + other.targets,
            self.dropped + other.dropped,
        )

    def format_messages(self, length: int) -> list[str]:
        """Messages about truncated and dropped examples.

        `length` is the number of tokens in a sample.
        """
        counts = (
            (self.prompts, f"{self.prompts} cut to {length} tokens"),
            (self.targets, f"{self.targets} with a target cut"),
            (self.dropped, f"{self.dropped} dropped, whose target is too long"),
        )
        return [note for count, note in counts if count]


NO_TRUNCATION = TruncationCounts()


@dataclass(frozen=True)
class TokenLimit:
    """Maximum number of tokens in a sequence, and the setting that determines it.

    Attributes:
        tokens: maximum number of tokens.
        field: setting that limits them.
        max_position_embeddings: longest sequence that the model supports; None without a limit.
    """

    tokens: int
    field: str
    max_position_embeddings: int | None = None

    def fitting_advice(self, tokens: int) -> str:
        """Advice for an error message: how to fit a sequence that is longer than the limit."""
        alternative = "--data.on_long_target truncate or skip"
        if self.max_position_embeddings is not None and tokens > self.max_position_embeddings:
            return f"the model was made for {self.max_position_embeddings}: give {alternative}"
        return f"give --{self.field} {tokens} or more, or {alternative}"

    def error(self, index: int, subject: str, tokens: int) -> TooLongError:
        """Error for an example of which `subject` tells the `tokens` that would have to fit."""
        advice = self.fitting_advice(tokens)
        return TooLongError(index, f"{subject}, but {self.field} is {self.tokens}: {advice}")


class ExampleError(ValueError):
    """Raised for an example that cannot be a part of a sample.

    Attributes:
        index: which one.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class TooLongError(ExampleError):
    """Raised for an example that has too many tokens for a sample."""


def truncate_targets(
    target_ids: Iterable[np.ndarray],
    texts: Sequence[str],
    limit: TokenLimit,
    on_long_target: OnLongTarget,
    num_end_tokens: int = 1,
) -> tuple[list[int], list[np.ndarray], TruncationCounts]:
    """Truncate or drop targets that exceed the token limit, or raise TooLongError.

    Args:
        target_ids: token ids of each target, the end token included, int32 [n].
        texts: the targets, for messages.
        num_end_tokens: see `truncate_right`.

    Returns:
        The indices of the examples that are kept, their targets' tokens, and what was left out.

    Raises:
        TooLongError: one is longer, and `on_long_target` is "error".
    """
    rows, length = list(target_ids), limit.tokens
    too_long = [i for i, row in enumerate(rows) if len(row) > length]
    if too_long and on_long_target == "error":
        longest = max(too_long, key=lambda i: len(rows[i]))
        text = texts[longest] if len(texts[longest]) <= 40 else f"{texts[longest][:37]}..."
        tokens = len(rows[longest])
        subject = f"the target {text!r} has {tokens} tokens with the end token"
        raise limit.error(longest, subject, tokens)
    if on_long_target == "skip":
        dropped = set(too_long)
        indices = [i for i in range(len(rows)) if i not in dropped]
        return indices, [rows[i] for i in indices], TruncationCounts(dropped=len(too_long))
    for i in too_long:
        rows[i] = truncate_right(rows[i], length, num_end_tokens)
    return list(range(len(rows))), rows, TruncationCounts(targets=len(too_long))


def truncate_right(ids: np.ndarray, length: int, num_end_tokens: int = 1) -> np.ndarray:
    """Truncate token ids on the right, [n] → [length]; the last `num_end_tokens` stay."""
    num_end = min(num_end_tokens, length)
    return np.append(ids[: length - num_end], ids[len(ids) - num_end :])


def left_truncated_indices(size: int, length: int, num_fixed: int) -> np.ndarray:
    """Indices of the tokens that remain if a sequence is truncated on the left, int64 [n].

    Args:
        num_fixed: tokens before that beginning, such as `<bos>`, which stay.
    """
    num_fixed, num_removed = min(num_fixed, length), max(size - length, 0)
    indices = np.arange(size - num_removed)
    return np.where(indices < num_fixed, indices, indices + num_removed)
