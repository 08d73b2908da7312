"""Location of the assistant's turns in the rendered text of a conversation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from data.conversations import REASONING_FIELDS, Message

_HEADER_END = re.compile(r"[\n>\]:]")
"""Characters that can end the header of an answer."""
_PLACEHOLDER = "\ue000another\ue001"
"""Text that begins and ends with private-use characters, unlike any answer."""


class ConversationError(ValueError):
    """A conversation that the chat template rejects, or that has no loss tokens."""


class CharSpan(NamedTuple):
    """Range of characters [start, end) in a text."""

    start: int
    end: int


class StopTokens(NamedTuple):
    """Special tokens that end an assistant's answer in the rendered conversation.

    Attributes:
        last: ends an answer at the end; None: the template writes none.
        inner: ends one before other messages.
        special: all special tokens, of which another one may end a call.
    """

    last: str | None
    inner: str | None
    special: re.Pattern[str]


class TurnLocator:
    """Finds the character spans of a conversation's turns by rendering its prefixes."""

    def __init__(
        self,
        render: Callable[[Sequence[Message], bool], str],
        messages: Sequence[Message],
        text: str,
        stops: StopTokens,
    ) -> None:
        """Stores the rendered conversation and the renderer of its prefixes.

        Args:
            render: the text of messages, or what asks for an answer to them.
            text: that of all messages.
        """
        self._render, self._messages, self.text, self._stop_tokens = render, messages, text, stops
        self._prompt_texts: dict[int, str] = {}

    def render_prompt(self, turn: int) -> str:
        """Returns the conversation rendered up to a turn, with the generation prompt at its end."""
        if turn not in self._prompt_texts:
            self._prompt_texts[turn] = self._render(self._messages[:turn], True)
        return self._prompt_texts[turn]

    def render_before_turn(self, turn: int) -> str:
        """Returns the conversation rendered up to a turn, without a generation prompt."""
        return self._render(self._messages[:turn], False)

    def find_answer_span(self, turn: int) -> CharSpan:
        """Returns the span of the assistant's answer in a turn, stop token included.

        A template may render an answer in another way once more follows: Qwen3's leaves out the
        thoughts at its beginning. The loss is on the text as rendered then.

        Raises:
            ConversationError: the whole text lacks the answer as the template writes it there.
        """
        try:
            return self._find_answer_after_prefix(turn)
        except ConversationError:
            span = self._find_answer_by_placeholder(turn)
            if span is None:
                raise
            return span

    def _find_answer_after_prefix(self, turn: int) -> CharSpan:
        """Finds an answer by rendering the earlier messages; raises ConversationError otherwise."""
        is_last = turn == len(self._messages) - 1
        rendered = self.text if is_last else self._render(self._messages[: turn + 1], False)
        start_of_answer = self._find_possible_answer_starts(turn, rendered)[-1]
        stop_length, stop = 0, self._stop_tokens.last
        if stop is not None and stop in rendered[start_of_answer:]:
            stop_text = stop if is_last else self._stop_tokens.inner or stop
            stop_length = len(stop_text)
            rendered = rendered[: rendered.rindex(stop)] + stop_text
        prefix_starts = (
            range(start_of_answer, len(rendered) - stop_length + 1)
            if stop_length
            else (start_of_answer,)
        )
        starts = self._find_possible_answer_starts(turn, self.text)
        for first in prefix_starts:  # as little as may be
            for start in starts:
                if self.text.startswith(rendered[first:], start):
                    return CharSpan(start, start + len(rendered) - first)
        raise ConversationError(
            f"the chat template writes message {turn + 1} differently in the whole conversation: "
            "try --data.loss_on last_turn"
        )

    def _find_answer_by_placeholder(self, turn: int) -> CharSpan | None:
        """Finds an answer by rendering the conversation with a placeholder for it.

        Returns None if the template has no generation prompt.

        Messages before it may be written in another way once more follows: Qwen3's template leaves
        out the thoughts of calls before the last question.
        """
        prompt = self.render_prompt(turn)
        header = prompt[_common_prefix_length(prompt, self.render_before_turn(turn)) :]
        messages = [*self._messages]
        messages[turn] = _replace_texts_by_placeholder(messages[turn])
        text, other_text = self.text, self._render(messages, False)
        prefix_length = _common_prefix_length(text, other_text)
        suffix_length = _common_prefix_length(text[::-1], other_text[::-1])
        header_lengths = [len(header), *(end.end() for end in _HEADER_END.finditer(header))]
        # The header that is nearest before the first difference, as long as can be.
        start, header_length = max(
            (text.rfind(header[:header_length], 0, prefix_length), header_length)
            for header_length in header_lengths
        )
        if not header or start < 0:
            return None
        end = len(text) - suffix_length
        if self._stop_tokens.last is not None and (
            match := self._stop_tokens.special.search(text, end)
        ):
            end = match.end()
        return CharSpan(start + header_length, end) if end > start + header_length else None

    def _find_possible_answer_starts(self, turn: int, text: str) -> list[int]:
        """Returns the offsets at which an answer can start in a rendered text that contains it."""
        prompt = self.render_prompt(turn)
        if text.startswith(prompt):
            return [len(prompt)]
        # What asks for an answer may go on where the text has the answer, such as with <think>.
        shared_length = _common_prefix_length(prompt, text)
        min_length = _common_prefix_length(prompt, self.render_before_turn(turn))
        ends = [end.end() for end in _HEADER_END.finditer(prompt, 0, shared_length)]
        ends = [end for end in ends if end >= min_length]
        if not ends:
            raise ConversationError(
                f"the chat template writes what precedes message {turn + 1} differently in the "
                "whole conversation: try --data.loss_on last_turn"
            )
        return ends


def _replace_texts_by_placeholder(message: Message) -> Message:
    """Returns a message whose texts are replaced by placeholders, with its structure unchanged."""
    replaced = {
        name: _PLACEHOLDER if name in REASONING_FIELDS else value for name, value in message.items()
    }
    if message.get("content"):
        replaced["content"] = _PLACEHOLDER
    if message.get("tool_calls"):
        replaced["tool_calls"] = list(map(_replace_arguments_by_placeholder, message["tool_calls"]))
    return replaced


def _replace_arguments_by_placeholder(tool_call: Mapping[str, Any]) -> Mapping[str, Any]:
    function, text = tool_call["function"], isinstance(tool_call["function"]["arguments"], str)
    arguments = _PLACEHOLDER if text else {_PLACEHOLDER: _PLACEHOLDER}
    return {**tool_call, "function": {**function, "arguments": arguments}}


def _common_prefix_length(first: str, second: str) -> int:
    """Returns the length of the common prefix of two strings."""
    char_pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in char_pairs if a != b), min(len(first), len(second)))
