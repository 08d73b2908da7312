"""A rollout: a completion that a policy wrote, with its reward."""

from __future__ import annotations

from typing import NamedTuple


class Rollout(NamedTuple):
    """Reward of a completion, and other values of its row besides the text.

    Attributes:
        reward: NaN if it was not scored.
        group: completions of one group are compared; None: those of one prompt.
        is_truncated: True if the completion ends without an end token; None: unknown.
        logprobs: log-probabilities of its tokens by the policy that wrote it; None: unknown.
        prompt_ids, completion_ids: tokens; empty: to be tokenized.
    """

    reward: float
    group: str | None = None
    is_truncated: bool | None = None
    logprobs: tuple[float, ...] | None = None
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()

    def with_ids(self, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> Rollout:
        """Copy of the rollout with these tokens."""
        return self._replace(prompt_ids=prompt_ids, completion_ids=completion_ids)
