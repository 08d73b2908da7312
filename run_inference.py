"""Compare answers to one micro-batch with those of Hugging Face's model with the same weights.

python3 run_inference.py --load runs/gptj_tiny --micro_batch_size 4

Alone it takes Graphcore/gptj-mnli and a micro-batch of 16.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from planning.config_loader import CONFIG_LOADER
from terminal.command_line import read_command_line
from terminal.entry_point import entry_point
from terminal.screen import is_first_process


@entry_point(caches=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, generate answers with both programs, and print them."""
    line = read_command_line(
        __doc__, "inference", "gptj_6B_gpu", arguments, loader=CONFIG_LOADER, takes_default=True
    )
    line.config.check_generates_text()
    # These take seconds: mistakes in the command line are said before.
    from data.data_cache import DataCache
    from planning.auto_config import resolve_auto_fields
    from planning.hardware.resource_errors import explain_resource_errors
    from run.evaluation.compare_with_hf import compare_with_hf

    data_cache = DataCache()
    line = resolve_auto_fields(line, ("validation",), data_cache=data_cache)
    with explain_resource_errors(line.preset, line.config):
        text = compare_with_hf(line.config, data_cache).text()
    if is_first_process():
        print(text)


if __name__ == "__main__":
    sys.exit(main())
