"""Validate a fine-tuned model: the part of the validation set that it answers rightly.

python3 run_validation.py --config tiny --load runs/tiny
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from config.cli import entry_point, read_command_line
from evaluation.validate import validate
from planning.needs import inference_needs
from planning.options import add_plan_options, planned


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where validation.json goes; by default the directory of the checkpoint that is "
        "loaded, else a new one under runs/",
    )
    add_plan_options(parser)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and validate."""
    line = read_command_line(__doc__, "inference", "xxl_pod64", arguments, _add_options)
    if not planned(line, inference_needs):
        print(validate(line).summary())


if __name__ == "__main__":
    sys.exit(main())
