"""Answer prompts with a fine-tuned or a published model.

python3 run_generation.py --load runs/tiny "mnli hypothesis: Anna slept. premise: Anna was awake."
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from config.errors import ConfigError
from config.process_checks import check_same_run_on_all_processes
from files.atomic_writing import check_can_write_file
from planning.config_loader import CONFIG_LOADER
from terminal.command_line import read_command_line
from terminal.entry_point import entry_point
from terminal.parser import parse_path_option
from terminal.screen import is_first_process


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to answer")
    group = parser.add_argument_group("prompts and answers")
    group.add_argument(
        "--file",
        metavar="FILE",
        type=parse_path_option,
        help="rows to answer (.jsonl, .json, .csv, .parquet), with the columns of the run's "
        "template, with a column prompt, or with messages; without it and without a PROMPT, lines "
        "of standard input",
    )
    group.add_argument(
        "--out",
        metavar="FILE",
        type=parse_path_option,
        help="JSON Lines for the answers (default: standard output)",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="converse with the model: each line is what the user says next; /new begins anew",
    )
    group.add_argument(
        "--no_template",
        action="store_true",
        help="give the model the texts as they are, without the template of its training",
    )


@entry_point(caches=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and the prompts, generate answers and print them."""
    line = read_command_line(__doc__, "inference", "tiny", arguments, _add_options, CONFIG_LOADER)
    line.config.check_generates_text()
    given = line.options
    if given.prompts and given.file is not None:
        raise ConfigError("there are prompts as arguments and in --file: give one of them")
    if given.chat and (given.prompts or given.file or given.out or given.no_template):
        raise ConfigError(
            "--chat reads what is typed and prints the answers: leave prompts, --file, --out and "
            "--no_template out"
        )
    if any("\udc80" <= character <= "\udcff" for text in given.prompts for character in text):
        raise ConfigError("a prompt among the arguments is not UTF-8 text")
    if given.out is not None:
        check_can_write_file("the answers", given.out)
    # These take seconds: mistakes in the command line are said before.
    from data.data_cache import DataCache
    from planning.auto_config import resolve_auto_fields, with_generation_lengths
    from planning.hardware.resource_errors import explain_resource_errors
    from run.answers.generate import (
        answers_to_jsonl,
        generate_answers,
        prompts_from_file,
        prompts_from_texts,
        read_stdin_lines,
        resolve_prompt_format,
        uses_no_template,
        write_answers,
    )

    config = with_generation_lengths(resolve_auto_fields(line)).config
    # Before any process reads what others read elsewhere.
    asks = {"a file of prompts": given.file is not None, "--no_template": given.no_template,
            "--chat": given.chat}  # fmt: skip
    check_same_run_on_all_processes(config, **asks)
    config = resolve_prompt_format(config, given.file, given.chat, given.no_template)
    if given.chat:
        from run.answers.chat_session import run_chat

        with explain_resource_errors(line.preset, config):
            run_chat(config)
        return
    raw, data_cache = given.no_template or uses_no_template(config), DataCache()
    if given.file is not None:
        asked = prompts_from_file(config, given.file, raw, data_cache)
    else:
        asked = prompts_from_texts(config, given.prompts or read_stdin_lines(), raw, data_cache)
    with explain_resource_errors(line.preset, config):
        answers = list(generate_answers(config, asked, data_cache))
    if not is_first_process():
        return
    if given.out is not None:
        write_answers(given.out, asked, answers)
    elif given.file is not None:
        print(answers_to_jsonl(asked, answers), end="")
    else:
        print("\n".join(answers))


if __name__ == "__main__":
    sys.exit(main())
