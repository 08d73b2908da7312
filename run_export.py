"""Write a checkpoint as a model folder of Hugging Face, without training. No device is needed.

python3 run_export.py --load runs/tiny --save-hf runs/tiny-hf
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from config.errors import ConfigError
from planning.config_loader import CONFIG_LOADER
from terminal.command_line import read_command_line
from terminal.entry_point import entry_point
from terminal.parser import add_export_option

PRECISION = "model.precision"


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, and export the checkpoint of `--load` as a Hugging Face model."""
    line = read_command_line(
        __doc__, "inference", "tiny", arguments, add_export_option, CONFIG_LOADER
    )
    if line.options.save_hf is None:
        raise ConfigError("there is nowhere to write to: give --save-hf DIR")
    if line.options.merge and not line.config.adapter.rank:
        raise ConfigError("--merge is for models with adapters, but what --load names has none")
    if line.options.merge == "dequantized" and line.config.model.quantization is None:
        raise ConfigError(
            "--merge dequantized is for adapters of weights in few bits, but model.quantization is "
            "null: give --merge, or the --quantization that they were trained with"
        )
    # These take seconds: mistakes in the command line are said before.
    from planning.hardware.resource_errors import explain_resource_errors
    from run.hf_export import export_checkpoint

    with explain_resource_errors(line.preset, line.config):
        precision = line.config.model.precision if line.settings.is_set_by_flag(PRECISION) else None
        export_checkpoint(line.config, line.options.save_hf, precision, line.options.merge)


if __name__ == "__main__":
    sys.exit(main())
