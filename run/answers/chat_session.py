"""Interactive chat with a model in the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

import numpy as np

import popdist
from config.base import flatten_by_path
from config.errors import ConfigError
from config.flags import infer_search_strategy, parse_field_overrides
from config.sections import RunConfig
from data.assistant_spans import ConversationError
from data.conversations import Conversation, Message, make_message
from data.pipeline import Pipeline
from data.sources import DataError
from data.tokenizer import warn_truncated_answers
from files.formatting import format_value
from modelling.generation.decoding_strategy import strategy_from_config
from modelling.model_family import get_family
from run.answers.generate import read_line
from run.initial_state import InitialState
from run.weight_loading import load_inference_weights
from sessions.generation import GenerationSession
from sessions.session import compile_session
from terminal.screen import is_first_process, say

MIN_PROMPT_TOKENS = 64
"""Prompt tokens of the first compiled program; each longer one has twice as many."""

NEW_COMMAND, HELP_COMMAND = "/new", "/help"
"""Commands that start a new conversation and list all commands."""

SETTINGS = (
    "temperature", "top_k", "top_p", "seed", "num_beams", "max_tokens", "repetition_penalty",
    "no_repeat_ngram_size", "stop_strings", "search",
)  # fmt: skip
"""Fields of `generation` that chat commands can set."""

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Decoded character of an incomplete UTF-8 sequence."""

_WITHOUT_SPACES = 0x2E80
"""First code point of scripts without spaces between words, such as Chinese."""

COMMAND = re.compile(r"/([a-z_]+)(?: +(\S.*))?")


def run_chat(config: RunConfig) -> None:
    """Answer each line of standard input until it ends.

    Raises:
        UserError: an error that a user can fix.
    """
    prompt = "> " if sys.stdin.isatty() else ""
    with ChatSession(config) as session:
        if prompt:
            say(
                f"{NEW_COMMAND} starts a new conversation, {HELP_COMMAND} lists commands, Ctrl-D "
                "ends it"
            )
        while (
            line := popdist.all_gather_object(read_line(prompt) if is_first_process() else None)[0]
        ) is not None:
            if command := COMMAND.fullmatch(line.strip()):
                say(_run_command(session, line.strip(), command[1], command[2]))
            elif line.strip():
                session.answer(line, _print_piece)
                _print_piece("\n")


def _print_piece(text: str) -> None:
    """Print a piece of a generated answer on process 0."""
    if is_first_process():
        print(text, end="", flush=True)


def _run_command(session: ChatSession, line: str, name: str, value: str | None) -> str:
    """Execute a command of the user in the chat, and return the reply to print."""
    if line == NEW_COMMAND:
        session.clear_history()
        return "a new conversation starts"
    if line == HELP_COMMAND:
        return (
            f"{NEW_COMMAND} starts a new conversation, Ctrl-D ends; /NAME VALUE sets one of "
            f"{', '.join(SETTINGS)}"
        )
    if name not in SETTINGS or value is None:
        return f"there is no command {format_value(line)}: {HELP_COMMAND} lists them"
    try:
        session.set_generation_option(name, value)
    except ConfigError as error:
        return f"error: {error}"
    return f"{name} is {value} from now on"


class ChatSession:
    """Chat with a model, with conversation history.

    A context manager: the model stays on the devices inside of it. Programs are compiled for a
    maximum number of tokens, which doubles when a conversation becomes longer. A conversation
    longer than the model's context loses its oldest messages.
    """

    def __init__(self, config: RunConfig) -> None:
        execution = replace(config.execution, micro_batch_size=1, device_iterations=1)
        self._config = replace(config, execution=execution)
        self._family, self._start = get_family(self._config), load_inference_weights(self._config)
        self._data = Pipeline(self._config, self._family.sample_format)
        self._model: GenerationSession | None = None
        self._exit_stack = ExitStack()
        self._prompt_tokens = 0
        self._messages: list[Message] = []
        self._chat = self._data.chat_template  # fails here if the tokenizer has no template

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._release_model()

    def _release_model(self) -> None:
        """Release the device memory of the loaded model."""
        self._model = None
        self._exit_stack.close()

    def clear_history(self) -> None:
        """Clear the conversation history."""
        self._messages = []

    def set_generation_option(self, name: str, value: str) -> None:
        """Set a field of the generation config, such as temperature, and the search that uses it.

        Raises:
            ConfigError: invalid value.
        """
        overrides = parse_field_overrides({f"generation.{name}": value}, type(self._config))
        self._config = self._config.with_values(
            flatten_by_path(infer_search_strategy(overrides, {}))
        )
        self._data = replace(self._data, user_config=self._config)
        self._release_model()

    def answer(self, text: str, show: Callable[[str], object] = len) -> str:
        """Return the model's reply to the next user message.

        Args:
            show: called with each new piece of the reply.

        Raises:
            DataError: the chat template rejects the conversation.
        """
        self._messages.append(make_message("user", text))
        resolved_config, input_ids, length = self._encode_prompt()
        model = self._compile_if_needed(resolved_config, input_ids.shape[1])
        mask = (np.arange(self._prompt_tokens) < length).astype(np.int32)[None]
        written: list[np.ndarray] = []

        def growing_answer() -> Iterator[str]:
            for tokens in model.stream(input_ids, mask):
                written[:] = [tokens]
                yield self._data.tokenizer.decode(tokens)[0]

        answer = ""
        for piece in iter_completed_words(growing_answer()):
            show(piece)
            answer += piece
        warn_truncated_answers(
            written[0], self._data.tokenizer, resolved_config.generation.parse_stop_strings()
        )
        self._messages.append(make_message("assistant", answer))
        return answer

    def _compile_if_needed(
        self, resolved_config: RunConfig, prompt_tokens: int
    ) -> GenerationSession:
        """Return the model on the devices, compiled for prompts of `prompt_tokens` tokens."""
        if self._model is None or prompt_tokens != self._prompt_tokens:
            self._release_model()
            self._prompt_tokens = prompt_tokens
            strategy = strategy_from_config(resolved_config, self._data.tokenizer)
            token_by_token = (
                strategy.sequences_per_prompt == 1
            )  # beam search can still change earlier tokens
            model = compile_session(
                lambda: GenerationSession(resolved_config, strategy, token_by_token=token_by_token),
                "the program that generates",
            )

            def enter_session(start: InitialState) -> None:
                model.write(start.tensors)
                self._exit_stack.enter_context(model)

            self._start, _ = self._start.load_with_fallback(enter_session)
            self._model = model
        return self._model

    def _encode_prompt(self) -> tuple[RunConfig, np.ndarray, int]:
        """Return config, input_ids (1, prompt_tokens) and prompt length, within the context."""
        most = self._config.model.sequence_length
        resolved_config, prompts = self._data.make_prompts([self._format_prompt()])
        if prompts.num_truncated and len(self._messages) > 1:
            say(f"the conversation has more than {most} tokens: the oldest messages are left out")
        while prompts.num_truncated and len(self._messages) > 1:
            del self._messages[:2]
            resolved_config, prompts = self._data.make_prompts([self._format_prompt()])
        length = int(prompts.mask.sum())
        prompt_tokens = MIN_PROMPT_TOKENS
        while prompt_tokens < length:
            prompt_tokens *= 2
        prompt_tokens = min(max(prompt_tokens, self._prompt_tokens), most)
        input_ids = np.full((1, prompt_tokens), self._data.tokenizer.pad_token_id, np.int32)
        input_ids[0, :length] = prompts.input_ids[0, :length]
        return (
            replace(
                resolved_config, model=replace(resolved_config.model, sequence_length=prompt_tokens)
            ),
            input_ids,
            length,
        )

    def _format_prompt(self) -> str:
        try:
            return self._chat.render_prompt(
                Conversation(self._messages).with_system_message(self._config.data.system)
            )
        except ConversationError as error:
            raise DataError(str(error)) from None


def iter_completed_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield the newly completed words of a growing text, without surrounding spaces.

    Args:
        texts: the text so far, each longer than the one before.
    """
    printed = text = ""
    for grown in texts:
        text = grown.lstrip()
        complete = text[: _end_of_complete_words(text)]
        if len(complete) > len(printed) and complete.startswith(printed):
            yield complete[len(printed) :]
            printed = complete
    yield text.rstrip()[len(printed) :]


def _end_of_complete_words(text: str) -> int:
    """Return the index in a growing text at which its last complete word ends."""
    complete = text.rstrip(REPLACEMENT_CHARACTER)
    if complete and complete == text and ord(complete[-1]) >= _WITHOUT_SPACES:
        return len(complete)
    return len(complete[: max(0, *(complete.rfind(space) for space in " \n\t"))].rstrip())
