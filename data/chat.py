"""Chat templates: from a conversation to a text, with the parts of it that the assistant wrote.

A tokenizer's template is a Jinja program, which transformers runs in a sandbox, `data.rendering`
within limits; the text is the one that its `apply_chat_template` gives. What the assistant wrote is
known in two ways:

- blocks: the template itself marks it, with `{% generation %}`;
- prefixes: an answer is what the text of the messages up to it adds to the text that asks for it
  (`add_generation_prompt`).

Blocks count where a template has them, and are compared with prefixes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from config.errors import ConfigError
from data.conversations import WEIGHT, Conversation, Message, said
from data.rendering import render
from data.texts import MAX_CHARACTERS, Example, TextSpan
from files.location import FileLocation
from files.shown import shown, shown_name
from files.text import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Loss = Literal["all", "answers", "last"]

DAY = datetime(2026, 1, 1)
"""What templates that write the day are told in training: a run goes on tomorrow with the same
text."""

_BLOCKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DAYS = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_STOP = "an answer"
"""Content of an answer that shows what a template writes after one."""
_HEADER_ENDS = re.compile(r"[\n>\]:]")
"""Characters that end the beginning of an answer."""


class Refused(ValueError):
    """A conversation that the template does not take, or of which nothing would be learned."""


class Range(NamedTuple):
    """Characters of a text, from `start` up to `end`."""

    start: int
    end: int


class ChatTemplate:
    """The chat template of a tokenizer, and what is learned of its texts.

    Attributes:
        refused: the places of conversations that were left out, each with the reason.
        doubted: those of which blocks and prefixes say different things.
    """

    def __init__(
        self,
        base: PreTrainedTokenizerFast,
        variables: Mapping[str, Any] | None = None,
        loss: Loss = "answers",
        frozen: bool = True,
    ) -> None:
        """
        Args:
            variables: what the template is given besides the messages.
            loss: which of the assistant's turns are learned; "all" marks them all, too.
            frozen: a template that writes the day is told `DAY`, else the true one.

        Raises:
            ConfigError: the tokenizer has no template, or it is not one, or takes too long.
        """
        self.base, self.variables, self.loss = base, dict(variables or {}), loss
        self.refused: list[str] = []
        self.doubted: list[str] = []
        self.unknown_tools = False
        self._frozen = frozen
        self._check()

    def _check(self) -> None:
        """Raise ConfigError unless there is a template that can be read."""
        from jinja2 import TemplateSyntaxError

        try:
            self._source()
        except ValueError:  # none, or several of which none is the default
            raise ConfigError(
                "the tokenizer has no chat template: give one with --data.chat_template FILE, such "
                "as the chat_template.jinja of a model that has one"
            ) from None
        try:
            self._render([said("user", "a")], True)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not one that Jinja can read: line {error.lineno}: "
                f"{shown_name(error.message or '')}"
            ) from None
        except ConfigError:
            raise
        except Exception:  # it may want a system's message: its rows show
            pass

    @property
    def made_by(self) -> tuple[object, ...]:
        """All that its texts follow from, besides conversations."""
        return self.base.chat_template, self.base.special_tokens_map, self.variables

    # ---- what a model is given --------------------------------------------------------------
    def prompt(self, conversation: Conversation) -> str:
        """The text after which the model answers.

        Raises:
            Refused: the template does not take it.
        """
        return self._text(conversation, self._messages(conversation), True)

    def read(self, place: FileLocation, conversation: Conversation) -> Example | None:
        """The example that a conversation is; None, and noted, if it is refused."""
        try:
            return self.example(conversation, place)
        except Refused as error:
            self.refused.append(f"{place}: {error}")
            return None

    def example(self, conversation: Conversation, place: FileLocation | None = None) -> Example:
        """The text of a conversation, of which the assistant's turns are learned.

        Raises:
            Refused: see there.
        """
        messages = self._messages(conversation)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise Refused("it has no turn of the assistant")
        turns = turns[-1:] if self.loss == "last" else turns
        text, blocks = self._rendered(conversation, messages, False)
        written = Turns(lambda part, asks: self._text(conversation, part, asks), messages, text,
                        self.stop)  # fmt: skip
        ranges = self._ranges(written, turns, blocks, place)
        if len(ranges) != len(turns) and any(messages[i].get(WEIGHT) == 0 for i in turns):
            raise Refused(
                f"it has weights, but the template marks {len(ranges)} parts of {len(turns)} turns"
            )
        first = len(messages) - (conversation.answer_length or len(messages) - turns[-1])
        answers = messages[first]["role"] == "assistant"
        prompt = written.asked(first) if answers else written.before(first)
        start = len(prompt) if text.startswith(prompt) else ranges[-1].start
        target = self._visible(text[start : max(ranges[-1].end, start)])
        if len(ranges) == len(turns):
            ranges = [r for r, i in zip(ranges, turns, strict=True) if messages[i].get(WEIGHT) != 0]
        if not any(r.end > r.start for r in ranges):
            raise Refused("nothing of it is learned")
        return Example(prompt, target, _spans(text, ranges))

    def notes(self) -> Iterable[str]:
        """What is to be said of the conversations that were read."""
        if self.refused:
            yield (
                f"warning: {len(self.refused)} conversations are left out: {_first(self.refused)}"
            )
        if self.doubted:
            yield (
                f"warning: the generation blocks of the chat template, which count, do not mark "
                f"what answers add in {len(self.doubted)} conversations: {_first(self.doubted)}"
            )
        if self.unknown_tools:
            yield "warning: the chat template writes no tools: those of the rows are left out"

    # ---- what the template writes after an answer -------------------------------------------
    @cached_property
    def stop(self) -> str | None:
        """The special token that ends an answer; None: the template writes none."""
        for head in ([], [said("system", "a")]):
            messages = [*head, said("user", "a"), said("assistant", _STOP)]
            try:
                after = self._render(messages, False)[0].rpartition(_STOP)[2]
            except ConfigError:
                raise
            except Exception:  # whatever a template raises
                continue
            known = self.base.added_tokens_decoder
            ids = self.base(after, add_special_tokens=False, verbose=False)["input_ids"]
            return next((str(known[i].content) for i in ids if i in known), None)
        return None

    @property
    def end(self) -> int | None:
        """The token of `stop`."""
        return None if self.stop is None else int(self.base.convert_tokens_to_ids(self.stop))

    # ---- rendering --------------------------------------------------------------------------
    def _rendered(
        self, conversation: Conversation, messages: Sequence[Message], asks: bool
    ) -> tuple[str, list[Range]]:
        tools = self._tools(conversation)
        try:
            text, blocks = self._render(messages, asks, tools)
        except ConfigError:
            raise
        except Exception as error:  # a template may raise anything
            raise Refused(
                f"the chat template refuses it: {shown_name(_reason(error), 150)}"
            ) from None
        if len(text) > MAX_CHARACTERS:
            most = f"{MAX_CHARACTERS:,}"
            raise Refused(f"a text of {len(text):,} characters, but at most {most} are read")
        return text, blocks

    def _text(self, conversation: Conversation, messages: Sequence[Message], asks: bool) -> str:
        return self._rendered(conversation, messages, asks)[0]

    def _render(
        self,
        messages: Sequence[Message],
        asks: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[Range]]:
        source, variables = self._source(tools), {**self.base.special_tokens_map, **self.variables}
        marks = _BLOCKS.search(source) is not None
        text, blocks = render(source, messages, tools, asks, marks, variables)
        return text, [Range(*block) for block in blocks]

    def _source(self, tools: object = None) -> str:
        """The template; of several, as transformers chooses."""
        source: str = self.base.get_chat_template(None, tools)
        return _with_day(source) if self._frozen and "strftime_now" in source else source

    def _tools(self, conversation: Conversation) -> Sequence[Mapping[str, Any]] | None:
        if conversation.tools is None or "tools" in self._source(conversation.tools):
            return conversation.tools
        self.unknown_tools = True
        return None

    def _messages(self, conversation: Conversation) -> list[Message]:
        """Its messages; tool calls become text for templates that do not know them, which would
        pass over them."""
        if "tool_calls" in self._source(conversation.tools):
            return list(conversation.messages)
        return [_calls_as_text(message) for message in conversation.messages]

    # ---- what is learned --------------------------------------------------------------------
    def _ranges(
        self,
        written: Turns,
        turns: Sequence[int],
        blocks: Sequence[Range],
        place: FileLocation | None,
    ) -> list[Range]:
        """What the assistant wrote in these turns, in order."""
        if not blocks:
            return [written.answer(turn) for turn in turns]
        blocks = blocks[-1:] if self.loss == "last" else blocks
        text = written.text
        try:
            expected = [text[slice(*written.answer(turn))] for turn in turns]
        except Refused:  # nothing to compare with
            return list(blocks)
        marked = [text[slice(*block)].rstrip() for block in blocks]
        if marked != [answer.rstrip() for answer in expected]:
            pairs = zip([*marked, ""], [*expected, ""], strict=False)
            one, other = next(((a, b) for a, b in pairs if a != b.rstrip()), ("", ""))
            self.doubted.append(f"{place}: {shown(one)} marked, {shown(other)} added")
        return list(blocks)

    def _visible(self, answer: str) -> str:
        """An answer as people see it, without special tokens."""
        text = answer.rpartition(self.stop)[0] if self.stop and self.stop in answer else answer
        if any(token in text for token in self.base.all_special_tokens):
            ids = self.base(text, add_special_tokens=False, verbose=False)["input_ids"]
            text = str(self.base.decode(ids, skip_special_tokens=True))
        return text.strip()


class Turns:
    """Where the turns of a conversation stand in its text, found by writing its beginnings."""

    def __init__(
        self,
        write: Callable[[Sequence[Message], bool], str],
        messages: Sequence[Message],
        text: str,
        stop: str | None,
    ) -> None:
        """
        Args:
            write: the text of messages, or what asks for an answer to them.
            text: that of all messages.
            stop: what ends an answer.
        """
        self._write, self._messages, self.text, self._stop = write, messages, text, stop
        self._asked: dict[int, str] = {}

    def asked(self, turn: int) -> str:
        """The text that asks for the answer at an index."""
        if turn not in self._asked:
            self._asked[turn] = self._write(self._messages[:turn], True)
        return self._asked[turn]

    def before(self, turn: int) -> str:
        """The text of the messages before an index."""
        return self._write(self._messages[:turn], False)

    def answer(self, turn: int) -> Range:
        """What the answer at an index adds, up to and with what ends it.

        A template may write an answer in another way once more follows: Qwen3's leaves out the
        thoughts at its beginning. What is learned is what stands there then.

        Raises:
            Refused: the whole text does not hold the answer as the template writes it there.
        """
        last = turn == len(self._messages) - 1
        fresh = self.text if last else self._write(self._messages[: turn + 1], False)
        begin = self._starts(turn, fresh)[-1]
        least = 0
        if self._stop is not None and self._stop in fresh[begin:]:
            least = len(self._stop)
            fresh = fresh[: fresh.rindex(self._stop) + least]
        dropped = range(begin, len(fresh) - least + 1) if least else (begin,)
        starts = self._starts(turn, self.text)
        for first in dropped:  # as little as may be
            for start in starts:
                if self.text.startswith(fresh[first:], start):
                    return Range(start, start + len(fresh) - first)
        raise Refused(
            f"the chat template writes message {turn + 1} differently in the whole conversation: "
            "try --data.loss last"
        )

    def _starts(self, turn: int, text: str) -> list[int]:
        """Where the answer may begin in a text that holds it."""
        asked = self.asked(turn)
        if text.startswith(asked):
            return [len(asked)]
        # What asks for an answer may go on where the text has the answer, such as with <think>.
        same = _common(asked, text)
        least = _common(asked, self.before(turn))
        ends = [end.end() for end in _HEADER_ENDS.finditer(asked, 0, same)]
        ends = [end for end in ends if end >= least]
        if not ends:
            raise Refused(
                f"the chat template writes what precedes message {turn + 1} differently in the "
                "whole conversation: try --data.loss last"
            )
        return ends


def _common(one: str, other: str) -> int:
    """How many characters at the beginning of both are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def chat_template_of(
    base: PreTrainedTokenizerFast,
    file: str | None,
    variables: str | None,
    loss: Loss,
    frozen: bool = True,
) -> ChatTemplate:
    """The template of a tokenizer, which it keeps.

    Args:
        file: one to take instead of its own.
        variables: a JSON object.

    Raises:
        UserError: there is none, or a file or the variables cannot be read.
    """
    if file is not None:
        base.chat_template = read_text(Path(file))
    given: Any = {}
    if variables is not None:
        try:
            given = json.loads(variables)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise ConfigError(
                f"data.chat_variables is {shown(variables)}, but must be a JSON object, such as "
                '{"enable_thinking": false}'
            )
    return ChatTemplate(base, given, loss, frozen)


def _calls_as_text(message: Message) -> Message:
    """A message whose tool calls are text, in the form of Hermes and Qwen."""
    if "tool_calls" not in message:
        return message
    lines = [message["content"]] if message.get("content") else []
    for call in message["tool_calls"]:
        lines.append(
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        )
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": "\n".join(lines)}


@cache
def _with_day(source: str) -> str:
    """A template in which today is `DAY`."""
    days = {form: DAY.strftime(form) for _, form in _DAYS.findall(source)}
    told = f"{json.dumps(days)}[form]|default({DAY.strftime('%d %b %Y')!r})"
    return f"{{% macro strftime_now(form) %}}{{{{ {told} }}}}{{% endmacro %}}\n{source}"


def _spans(text: str, learned: Sequence[Range]) -> tuple[TextSpan, ...]:
    """A text in spans of which every other one is learned."""
    spans, at = list[TextSpan](), 0
    for start, end in learned:
        spans += [TextSpan(text[at:start], False), TextSpan(text[start:end], True)]
        at = end
    spans.append(TextSpan(text[at:], False))
    return tuple(span for span in spans if span.text)


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _first(items: Sequence[str], most: int = 3) -> str:
    """The first of a list, for a message."""
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more
