"""Generated answers to prompts from arguments, files or standard input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import popdist
from checkpoints import has_checkpoint
from config.process_checks import check_same_on_all_processes, hash_json
from config.sections import RunConfig
from data.assistant_spans import ConversationError
from data.conversations import Conversation, has_conversation, is_message, make_message
from data.data_cache import DataCache
from data.examples import NO_LANGUAGES, Languages
from data.pipeline import Pipeline
from data.prompt_template import ColumnError
from data.sources import DataError, FileSource, Row
from data.task import task_from_config
from data.tokenizer import warn_truncated_answers
from files.atomic_writing import write_text_atomically
from files.file_location import FileLocation
from files.formatting import format_path
from huggingface.pretrained import read_pretrained
from modelling.generation.decoding_strategy import strategy_from_config
from modelling.model_family import get_family
from planning.config_loader import exported_task_fields
from run.initial_state import InitialState
from run.startup_warnings import length_warnings
from run.weight_loading import load_inference_weights
from sessions.generation import GenerationSession
from sessions.session import compile_session
from terminal.screen import is_first_process, progress_bar, say

GENERATED = "generated"
"""Column name of answers."""


@dataclass(frozen=True)
class PromptRow:
    """A rendered prompt, and the row of the input file that it comes from.

    Attributes:
        row: columns of the data row; a plain text is the column `prompt`.
        text: the rendered prompt, as the model reads it.
        languages: of the prompt and its answer.
    """

    row: Mapping[str, Any]
    text: str
    languages: Languages = NO_LANGUAGES


def generate_answers(
    config: RunConfig, prompts: Sequence[PromptRow], data_cache: DataCache
) -> Iterator[str]:
    """Generate an answer to each prompt, in order.

    Raises:
        UserError: an error that a user can fix.
    """
    if not prompts:
        raise DataError("there are no prompts: give some as arguments, --file or standard input")
    prompts_digest = hash_json([prompt.text, *prompt.languages] for prompt in prompts)
    check_same_on_all_processes(
        {"number of prompts": len(prompts), "digest of the prompts": prompts_digest}
    )
    family = get_family(config)
    data = Pipeline(_limit_micro_batch(config, len(prompts)), family.sample_format, data_cache)
    resolved_config, encoded = data.make_prompts(
        [prompt.text for prompt in prompts], [prompt.languages for prompt in prompts]
    )
    if encoded.num_truncated:
        say(
            f"warning: {encoded.num_truncated} of {len(prompts)} prompts cut to "
            f"{config.model.sequence_length} tokens"
        )
    for note in length_warnings(
        resolved_config, family.sample_format.output_length(resolved_config)
    ):
        say(note)
    start = load_inference_weights(resolved_config)
    strategy = strategy_from_config(resolved_config, data.tokenizer, encoded)
    model = compile_session(
        lambda: GenerationSession(resolved_config, strategy), "the program that generates"
    )
    bar = progress_bar("", len(prompts), "prompt")

    def run_model(start: InitialState) -> np.ndarray:
        model.write(start.tensors)
        with model, bar:
            return model.generate(encoded.input_ids, encoded.mask, bar.update)

    tokens = start.load_with_fallback(run_model)[1]
    warn_truncated_answers(tokens, data.tokenizer, config.generation.parse_stop_strings())
    yield from (text.strip() for text in data.tokenizer.decode(tokens))


def resolve_prompt_format(config: RunConfig, file: str | None, chat: bool, raw: bool) -> RunConfig:
    """Return the config with the format of the prompts: "conversational" or plain text.

    Args:
        file: file of prompts; rows with messages are conversations. None: no file.
        chat: True if the user asked for a conversation.
        raw: True if the user asked for prompts without template.
    """
    data = config.data
    is_conversational = chat or (not raw and data.format == "conversational")
    if file is not None and not raw and data.format is None:
        rows = islice(FileSource(file).read_rows(), 1)
        is_conversational = is_conversational or any(
            is_message(row) or has_conversation(row, data.messages) for _, row in rows
        )
    return replace(
        config,
        data=replace(data, format="conversational" if is_conversational else "prompt_completion"),
    )


def prompts_from_texts(
    config: RunConfig, texts: Sequence[str], raw: bool, data_cache: DataCache
) -> list[PromptRow]:
    """Render prompts that are given as texts on the command line.

    A text is the content of the prompt template's only column, or in a chat the first user message.

    Args:
        raw: use the texts as they are, without template and separator.
    """
    template = task_from_config(config.data).prompt
    column_template = None if template is None or raw or len(template.columns) != 1 else template
    rendered = [
        column_template.render({column_template.columns[0]: text}) if column_template else text
        for text in texts
    ]
    rows = [{"prompt": text} for text in texts]
    if config.data.format == "conversational":
        conversations = (Conversation([make_message("user", text)]) for text in rendered)
        located_rows = [
            (f"prompt {i}", conversation) for i, conversation in enumerate(conversations, 1)
        ]
        return _render_conversations(config, located_rows, rows, data_cache)
    languages = task_from_config(config.data).languages.fixed_languages
    return [
        PromptRow(row, _render_prompt(config, prompt, raw), languages)
        for row, prompt in zip(rows, rendered, strict=True)
    ]


def prompts_from_file(
    config: RunConfig, file: str, raw: bool, data_cache: DataCache
) -> list[PromptRow]:
    """Render the prompts in a data file.

    Its rows have the columns of the task's prompt template, a column `prompt`, or a conversation. A
    file can also be one conversation: an array of messages.

    Raises:
        UserError: the file cannot be read, or a row has no prompt.
    """
    task, prompts = task_from_config(config.data), []
    if config.data.format == "conversational":
        return _conversations_from_file(config, file, data_cache)
    for location, row in FileSource(file).read_rows():
        try:
            text = row["prompt"] if raw and "prompt" in row else task.render_prompt(row)
            languages = task.languages.row_languages(row)
        except ColumnError as error:
            raise DataError(f"{location}: {error}") from None
        prompts.append(PromptRow(row, _render_prompt(config, f"{text}", raw), languages))
    return prompts


def _conversations_from_file(
    config: RunConfig, file: str, data_cache: DataCache
) -> list[PromptRow]:
    task = task_from_config(config.data)
    located_rows: list[tuple[FileLocation | str, Row]] = list(FileSource(file).read_rows())
    if located_rows and all(is_message(row) for _, row in located_rows):
        located_rows = [(format_path(file), {"messages": [row for _, row in located_rows]})]
    conversations = list[tuple[FileLocation | str, Conversation]]()
    for location, row in located_rows:
        try:
            conversations.append((location, task.read_prompt_conversation(row)))
        except ColumnError as error:
            raise DataError(f"{location}: {error}") from None
    return _render_conversations(
        config, conversations, [row for _, row in located_rows], data_cache
    )


def _render_conversations(
    config: RunConfig,
    conversations: Sequence[tuple[FileLocation | str, Conversation]],
    rows: Sequence[Mapping[str, Any]],
    data_cache: DataCache,
) -> list[PromptRow]:
    """Render conversations by the chat template; locations are for error messages."""
    chat = Pipeline(config, get_family(config).sample_format, data_cache).chat_template
    prompts = []
    for (location, conversation), row in zip(conversations, rows, strict=True):
        try:
            prompts.append(
                PromptRow(
                    row,
                    chat.render_prompt(
                        conversation.with_system_message(config.data.system), location
                    ),
                )
            )
        except ConversationError as error:
            raise DataError(f"{location}: {error}") from None
    for note in chat.warning_lines():
        say(note)
    return prompts


def read_stdin_lines() -> list[str]:
    """Read one prompt per line from standard input on the first process; collective.

    Raises:
        DataError: the input is not UTF-8.
    """
    lines = list(iter(read_line, None)) if is_first_process() else []
    return list(popdist.all_gather_object(lines)[0])


def read_line(prompt: str = "") -> str | None:
    """Read a line of standard input; returns None at end of file.

    Raises:
        DataError: the input is not UTF-8.
    """
    try:
        line = input(prompt)
        line.encode()  # Python can pass on undecodable bytes
    except EOFError:
        return None
    except UnicodeError as error:
        raise DataError("standard input is not UTF-8 text: convert it with iconv") from error
    return line


def answers_to_jsonl(prompts: Sequence[PromptRow], answers: Sequence[str]) -> str:
    """Return JSON Lines of the input rows, with the answer in the column `generated`.

    Values without a JSON type, such as dates of Parquet files, become strings.
    """
    rows = ({**a.row, GENERATED: text} for a, text in zip(prompts, answers, strict=True))
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def write_answers(path: str, prompts: Sequence[PromptRow], answers: Sequence[str]) -> None:
    """Write answers as JSON Lines to a file.

    Raises:
        WriteError: the file cannot be written.
    """
    write_text_atomically("the answers", Path(path), answers_to_jsonl(prompts, answers))


def uses_no_template(config: RunConfig) -> bool:
    """True if the weights are a published model's, which was trained without our templates."""
    load = config.checkpoint.load
    if load is None or has_checkpoint(load):
        return load is None
    return not exported_task_fields(read_pretrained(load).hf_config)


def _render_prompt(config: RunConfig, prompt: str, raw: bool) -> str:
    """Render a prompt as the model reads it; a raw prompt is unchanged."""
    return prompt if raw else get_family(config).sample_format.render_prompt(config, prompt)


def _limit_micro_batch(config: RunConfig, num_prompts: int) -> RunConfig:
    """Limit the micro-batch size to the number of prompts, rounded to a power of two."""
    e = config.execution
    needed = 1 << (-(-num_prompts // e.data_parallel) - 1).bit_length()
    size = min(e.micro_batch_size, needed)
    return replace(config, execution=replace(e, micro_batch_size=size))
