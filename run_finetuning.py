"""Fine-tune a model on MNLI, or on the sample corpus.

python3 run_finetuning.py --config tiny --save runs/tiny
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from config.cli import (
    add_export_option,
    add_reporting_options,
    entry_point,
    read_command_line,
)
from planning.needs import finetuning_needs
from planning.options import add_plan_options, planned
from training.finetune import finetune


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_reporting_options(parser)
    add_export_option(parser)
    add_plan_options(parser)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and train."""
    line = read_command_line(__doc__, "finetuning", "xxl_pod64", arguments, _add_options)
    if not planned(line, finetuning_needs):
        finetune(line)


if __name__ == "__main__":
    sys.exit(main())
