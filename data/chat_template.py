"""Chat templates: rendering of conversations to text with the assistant's spans.

A tokenizer's template is a Jinja program, which transformers runs in a sandbox,
`data.template_sandbox` in a process of its own; the text is the one that its `apply_chat_template`
gives. What the assistant wrote is known in two ways:

- blocks: the template itself marks it, with `{% generation %}`;
- prefixes: an answer is what the text of the messages up to it adds to the text that asks for it
  (`add_generation_prompt`).

Blocks count where a template has them, and are compared with prefixes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from config.errors import ConfigError
from config.task import LossOn
from data.assistant_spans import CharSpan, ConversationError, StopTokens, TurnLocator
from data.conversations import OPTIONAL_FIELDS, WEIGHT_FIELD, Conversation, Message, make_message
from data.data_warnings import (
    MISSING_ANSWER_PREFIX,
    NOT_RENDERED,
    TOOLS_NOT_RENDERED,
    UNUSED_FIELDS,
    UNUSED_WEIGHTS,
    DataWarnings,
)
from data.dropped_content import find_dropped_content
from data.examples import MAX_CHARACTERS, Example, TextSpan
from data.special_tokens import compile_token_regex, special_token_texts
from data.template_sandbox import render_in_sandbox
from data.tool_calls import (
    PROBE_FUNCTION,
    PROBE_MESSAGE,
    TOOL_CALL_FORMATS,
    ToolCallFormat,
    tool_calls_to_text,
)
from files.file_location import FileLocation
from files.formatting import format_name, format_value
from files.text_files import read_text
from huggingface.tokenizer_checks import wrap_rust_panics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRAINING_DATE = datetime(2026, 1, 1)
"""Date given to templates in training, so that a run resumed on another day renders the same text.
"""

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_SAMPLE_ANSWER = "an answer"
"""Answer used to find the text that a template writes after an answer."""


class ChatTemplate:
    """Chat template of a tokenizer; renders conversations and finds the spans in the loss.

    Attributes:
        warnings: warnings about the conversations read so far.
    """

    def __init__(
        self,
        hf_tokenizer: PreTrainedTokenizerFast,
        variables: Mapping[str, Any] | None = None,
        loss: LossOn = "completion",
        fix_date: bool = True,
    ) -> None:
        """Checks the tokenizer's template by rendering a short conversation.

        Args:
            variables: what the template is given besides the messages.
            loss: assistant turns in the loss; "all" includes them all, too.
            fix_date: a template that writes the day is told `TRAINING_DATE`, else the true one.

        Raises:
            ConfigError: the tokenizer has no template, or it is not one, or takes too long.
        """
        self.hf_tokenizer, self.variables, self.loss = hf_tokenizer, dict(variables or {}), loss
        self.warnings = DataWarnings()
        self._fixes_date = fix_date
        self._rendered_fields: set[tuple[str, str]] = set()
        self._check_template()

    def _check_template(self) -> None:
        """Raise ConfigError unless the tokenizer has a chat template that renders conversations."""
        from jinja2 import TemplateSyntaxError

        try:
            self._jinja_source()
        except ValueError:  # none, or several of which none is the default
            raise ConfigError(
                "the tokenizer has no chat template: give one with --data.chat_template FILE, such "
                "as the chat_template.jinja of a model that has one"
            ) from None
        try:
            self._render([make_message("user", "a")], True)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not one that Jinja can read: line {error.lineno}: "
                f"{format_name(error.message or '')}"
            ) from None
        except ConfigError:
            raise
        except Exception:  # it may want a system's message: its rows show
            pass

    @property
    def cache_key(self) -> tuple[object, ...]:
        """Cache key of rendered texts: all that determines them besides the conversation."""
        return self.hf_tokenizer.chat_template, self.hf_tokenizer.special_tokens_map, self.variables

    # ---- what a model is given --------------------------------------------------------------
    def render_prompt(self, conversation: Conversation, location: object = None) -> str:
        """Render a conversation with the generation prompt, which asks for an answer.

        Raises:
            ConversationError: the template does not take it.
        """
        text = self._render_text(conversation, self._renderable_messages(conversation), True)
        self._warn_of_dropped_content(conversation, text, location, add_generation_prompt=True)
        return text

    def example_or_none(self, location: FileLocation, conversation: Conversation) -> Example | None:
        """Convert a conversation to an example; None with a warning if it cannot be rendered."""
        try:
            return self.make_example(conversation, location)
        except ConversationError as error:
            self.warnings.refused.append(f"{location}: {error}")
            return None

    def text_or_none(self, location: FileLocation, conversation: Conversation) -> str | None:
        """Render a whole conversation; None with a warning if it cannot be rendered."""
        try:
            messages = self._renderable_messages(conversation)
            text = self._render_text(conversation, messages, False)
        except ConversationError as error:
            self.warnings.refused.append(f"{location}: {error}")
            return None
        self._warn_of_dropped_content(conversation, text, location)
        return text

    def make_example(
        self, conversation: Conversation, location: FileLocation | None = None
    ) -> Example:
        """Convert a conversation to an example with the assistant's turns in the loss.

        Raises:
            ConversationError: see `render_prompt`.
        """
        messages = self._renderable_messages(conversation)
        answer_indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answer_indices:
            raise ConversationError("it has no turn of the assistant")
        answer_indices = answer_indices[-1:] if self.loss == "last_turn" else answer_indices
        text, blocks = self._render_or_raise(conversation, messages, False)
        locator = TurnLocator(
            lambda part, add_generation_prompt: self._render_text(
                conversation, part, add_generation_prompt
            ),
            messages,
            text,
            self._stop_tokens,
        )
        spans = self._find_assistant_spans(locator, answer_indices, blocks, location)
        if len(spans) != len(answer_indices) and any(
            messages[i].get(WEIGHT_FIELD) == 0 for i in answer_indices
        ):
            raise ConversationError(
                f"it has weights, but the template marks {len(spans)} parts of "
                f"{len(answer_indices)} turns"
            )
        first_answer = len(messages) - (
            conversation.answer_length or len(messages) - answer_indices[-1]
        )
        answers_follow = messages[first_answer]["role"] == "assistant"
        prompt = (
            locator.render_prompt(first_answer)
            if answers_follow
            else locator.render_before_turn(first_answer)
        )
        start = len(prompt) if text.startswith(prompt) else spans[-1].start
        target = self._strip_special_tokens(text[start : max(spans[-1].end, start)])
        if len(spans) == len(answer_indices):
            spans = [
                r
                for r, i in zip(spans, answer_indices, strict=True)
                if messages[i].get(WEIGHT_FIELD) != 0
            ]
        if not any(r.end > r.start for r in spans):
            raise ConversationError("none of its tokens is in the loss")
        self._warn_of_dropped_content(conversation, text, location)
        self._warn_of_unused_settings(
            conversation, prompt[start:] if start < len(prompt) else "", location
        )
        return Example(prompt, target, _split_by_loss(text, spans))

    def _warn_of_dropped_content(
        self,
        conversation: Conversation,
        text: str,
        location: object,
        add_generation_prompt: bool = False,
    ) -> None:
        """Record a warning about content that is missing from a conversation's rendered text.

        Args:
            add_generation_prompt: the text ends with the generation prompt.
        """
        add = self.warnings.count_warning
        ignored = self._find_ignored_fields(conversation, text, add_generation_prompt)
        for (role, name), value in ignored.items():
            if name == "content":
                add(NOT_RENDERED, f"messages of the role {role}", location, value)
            elif (role, "content") not in ignored:
                add(UNUSED_FIELDS, f"{name} (role {role})", location, value)
        messages = self._renderable_messages(conversation)
        rendered_messages = [
            message for message in messages if (message["role"], "content") not in ignored
        ]
        for name, value in find_dropped_content(rendered_messages, text).items():
            add(NOT_RENDERED, name, location, value)
        if conversation.tools is not None and self._rendered_tools(conversation) is None:
            add(
                TOOLS_NOT_RENDERED,
                "those of the rows are left out",
                location,
                conversation.tools[0],
            )
        for name, value in conversation.unused_fields.items():
            add(UNUSED_FIELDS, format_name(name), location, value)

    def _warn_of_unused_settings(
        self, conversation: Conversation, unused_prompt: str, location: object
    ) -> None:
        """Record warnings about unused loss weights and an unused generation prompt.

        Args:
            unused_prompt: the end of the generation prompt that the full text lacks.
        """
        for message in conversation.messages:
            is_assistant, weight = message["role"] == "assistant", message.get(WEIGHT_FIELD)
            if (weight == 1 and not is_assistant) or (
                weight == 0 and is_assistant and self.loss == "all"
            ):
                name = f"weight {weight} of messages of the role {message['role']}"
                self.warnings.count_warning(UNUSED_WEIGHTS, name, location, message.get("content"))
        if unused_prompt:
            answer = conversation.messages[-1].get("content")
            self.warnings.count_warning(
                MISSING_ANSWER_PREFIX, format_value(unused_prompt), location, answer
            )

    def _find_ignored_fields(
        self, conversation: Conversation, text: str, add_generation_prompt: bool
    ) -> dict[tuple[str, str], object]:
        """Message fields whose removal does not change the rendered text.

        By role and name, with their first value; the assistant's content is left out.
        """
        messages, ignored = self._renderable_messages(conversation), dict[tuple[str, str], object]()
        first_values = {
            (message["role"], name): message[name]
            for message in reversed(messages)
            for name in ("content", *OPTIONAL_FIELDS)
            if message.get(name) and (message["role"], name) != ("assistant", "content")
        }
        for (role, name), value in first_values.items():
            if (role, name) in self._rendered_fields:
                continue
            altered_messages = [
                {**message, name: f"{message[name]}{_SAMPLE_ANSWER}"}
                if message["role"] == role and name in message
                else message
                for message in messages
            ]
            try:
                is_unchanged = (
                    self._render_text(conversation, altered_messages, add_generation_prompt) == text
                )
            except ConversationError:  # it is read
                is_unchanged = False
            if is_unchanged:
                ignored[role, name] = value
            else:
                self._rendered_fields.add((role, name))
        return ignored

    def warning_lines(self) -> Iterable[str]:
        """Format the warnings about the conversations read so far, as lines of text."""
        return self.warnings.format_lines()

    @property
    def template_warnings(self) -> list[str]:
        """Warnings about the chat template's generation blocks that do not match the answer."""
        return self.warnings.template_warnings

    # ---- what the template writes after an answer -------------------------------------------
    @cached_property
    def stop_token(self) -> str | None:
        """Special token that ends an answer; None if the template writes none."""
        return self._stop_token_before([])

    @cached_property
    def _stop_tokens(self) -> StopTokens:
        inner_stop = self._stop_token_before([make_message("user", "b")]) or self.stop_token
        stops = [stop for stop in (self.stop_token, inner_stop) if stop]
        return StopTokens(
            self.stop_token,
            inner_stop,
            compile_token_regex([*special_token_texts(self.hf_tokenizer), *stops]),
        )

    def _stop_token_before(self, next_messages: Sequence[Message]) -> str | None:
        """Special token that ends an answer followed by the given messages; None without one."""
        for head in ([], [make_message("system", "a")]):
            messages = [
                *head,
                make_message("user", "a"),
                make_message("assistant", _SAMPLE_ANSWER),
                *next_messages,
            ]
            try:
                text_after = self._render(messages, False)[0].rpartition(_SAMPLE_ANSWER)[2]
            except ConfigError:
                raise
            except Exception:  # whatever a template raises
                continue
            added_tokens = self.hf_tokenizer.added_tokens_decoder
            with wrap_rust_panics():
                ids = self.hf_tokenizer(text_after, add_special_tokens=False, verbose=False)[
                    "input_ids"
                ]
            return next((str(added_tokens[i].content) for i in ids if i in added_tokens), None)
        return None

    @property
    def stop_token_id(self) -> int | None:
        """Token id of the special token that ends an answer."""
        return (
            None
            if self.stop_token is None
            else int(self.hf_tokenizer.convert_tokens_to_ids(self.stop_token))
        )

    # ---- rendering --------------------------------------------------------------------------
    def _render_or_raise(
        self, conversation: Conversation, messages: Sequence[Message], add_generation_prompt: bool
    ) -> tuple[str, list[CharSpan]]:
        tools = self._rendered_tools(conversation)
        try:
            text, blocks = self._render(
                messages, add_generation_prompt, tools, conversation.variables
            )
        except ConfigError:
            raise
        except Exception as error:  # a template may raise anything
            raise ConversationError(
                f"the chat template refuses it: {format_name(_first_error_line(error), 150)}"
            ) from None
        if len(text) > MAX_CHARACTERS:
            limit = f"{MAX_CHARACTERS:,}"
            raise ConversationError(
                f"a text of {len(text):,} characters, but at most {limit} are read"
            )
        return text, blocks

    def _render_text(
        self, conversation: Conversation, messages: Sequence[Message], add_generation_prompt: bool
    ) -> str:
        return self._render_or_raise(conversation, messages, add_generation_prompt)[0]

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        conversation_variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[str, list[CharSpan]]:
        source = self._jinja_source(tools)
        variables = {
            **self.hf_tokenizer.special_tokens_map,
            **self.variables,
            **conversation_variables,
        }
        has_generation_blocks = _GENERATION_BLOCK.search(source) is not None
        text, blocks = render_in_sandbox(
            source, messages, tools, add_generation_prompt, has_generation_blocks, variables
        )
        return text, [CharSpan(*block) for block in blocks]

    def _jinja_source(self, tools: object = None) -> str:
        """Jinja source of the chat template; if the tokenizer has several, transformers' choice."""
        source: str = self.hf_tokenizer.get_chat_template(None, tools)
        return (
            _fix_template_date(source) if self._fixes_date and "strftime_now" in source else source
        )

    def _rendered_tools(self, conversation: Conversation) -> Sequence[Mapping[str, Any]] | None:
        """Tool definitions of a conversation, if the template renders tools."""
        is_rendered = conversation.tools is None or "tools" in self._jinja_source(
            conversation.tools
        )
        return conversation.tools if is_rendered else None

    def _renderable_messages(self, conversation: Conversation) -> list[Message]:
        """Messages of a conversation, with tool calls in a format that the template supports."""
        if "tool_calls" in self._jinja_source(conversation.tools):
            return [
                self._tool_call_format.apply_to_message(message)
                for message in conversation.messages
            ]
        return [tool_calls_to_text(message) for message in conversation.messages]

    @cached_property
    def _tool_call_format(self) -> ToolCallFormat:
        """First tool-call message format that the chat template renders."""
        for call_format in TOOL_CALL_FORMATS:
            try:
                if (
                    PROBE_FUNCTION
                    in self._render(
                        [make_message("user", "a"), call_format.apply_to_message(PROBE_MESSAGE)],
                        False,
                    )[0]
                ):
                    return call_format
            except ConfigError:
                raise
            except Exception:  # whatever a template raises
                continue
        return TOOL_CALL_FORMATS[0]

    # ---- spans in the loss -------------------------------------------------------------------
    def _find_assistant_spans(
        self,
        locator: TurnLocator,
        answer_indices: Sequence[int],
        blocks: Sequence[CharSpan],
        location: FileLocation | None,
    ) -> list[CharSpan]:
        """Character spans of the assistant's text in the given turns, in order."""
        if not blocks:
            return [locator.find_answer_span(answer_index) for answer_index in answer_indices]
        blocks = blocks[-1:] if self.loss == "last_turn" else blocks
        text = locator.text
        try:
            expected = [
                text[slice(*locator.find_answer_span(answer_index))]
                for answer_index in answer_indices
            ]
        except ConversationError:  # nothing to compare with
            return list(blocks)
        block_texts = [text[slice(*block)].rstrip() for block in blocks]
        if block_texts != [answer.rstrip() for answer in expected]:
            pairs = zip([*block_texts, ""], [*expected, ""], strict=False)
            block_text, expected_text = next(
                ((a, b) for a, b in pairs if a != b.rstrip()), ("", "")
            )
            self.warnings.template_warnings.append(
                f"{location}: {format_value(block_text)} marked, {format_value(expected_text)} "
                "added"
            )
        return list(blocks)

    def _strip_special_tokens(self, answer: str) -> str:
        """Remove special tokens from a rendered answer."""
        text = (
            answer.rpartition(self.stop_token)[0]
            if self.stop_token and self.stop_token in answer
            else answer
        )
        if any(token in text for token in self.hf_tokenizer.all_special_tokens):
            with wrap_rust_panics():
                ids = self.hf_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            text = str(self.hf_tokenizer.decode(ids, skip_special_tokens=True))
        return text.strip()


def load_chat_template(
    hf_tokenizer: PreTrainedTokenizerFast,
    file: str | None,
    variables: str | None,
    loss: LossOn,
    fix_date: bool = True,
) -> ChatTemplate:
    """Load a tokenizer's chat template; a template file replaces it in place.

    Args:
        file: one to take instead of its own.
        variables: a JSON object.

    Raises:
        UserError: there is none, or a file or the variables cannot be read.
    """
    if file is not None:
        hf_tokenizer.chat_template = read_text(Path(file))
    template_variables: Any = {}
    if variables is not None:
        try:
            template_variables = json.loads(variables)
        except (ValueError, RecursionError):
            template_variables = None
        if not isinstance(template_variables, dict):
            raise ConfigError(
                f"data.chat_variables is {format_value(variables)}, but must be a JSON object, "
                "such as "
                '{"enable_thinking": false}'
            )
    return ChatTemplate(hf_tokenizer, template_variables, loss, fix_date)


@cache
def _fix_template_date(source: str) -> str:
    """Chat template source in which `strftime_now` returns the fixed `TRAINING_DATE`."""
    days = {form: TRAINING_DATE.strftime(form) for _, form in _DATE_CALL.findall(source)}
    formatted_date = f"{json.dumps(days)}[form]|default({TRAINING_DATE.strftime('%d %b %Y')!r})"
    return f"{{% macro strftime_now(form) %}}{{{{ {formatted_date} }}}}{{% endmacro %}}\n{source}"


def _split_by_loss(text: str, loss_spans: Sequence[CharSpan]) -> tuple[TextSpan, ...]:
    """Split a rendered text into spans inside and outside the loss, given the spans in the loss."""
    spans, position = list[TextSpan](), 0
    for start, end in loss_spans:
        spans += [TextSpan(text[position:start], False), TextSpan(text[start:end], True)]
        position = end
    spans.append(TextSpan(text[position:], False))
    return tuple(span for span in spans if span.text)


def _first_error_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
