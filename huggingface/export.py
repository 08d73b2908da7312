"""Models for Hugging Face: from a run that ends, or from a checkpoint, without training.

python3 -m huggingface.export --load runs/tiny --save-hf runs/tiny-hf
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from checkpoints import check_is_free, write_hf_directory
from checkpoints.origins import ORIGINS
from checkpoints.start import load_weights
from config.cli import add_export_option, entry_point, read_command_line
from config.errors import ConfigError
from config.screen import is_heard, say
from config.sections import RunConfig
from data.hub import DataUnavailable
from modelling.memory import check_least
from modelling.shortage import explained
from modelling.spec import ModelFamily, family_of
from modelling.text import load_tokenizer
from modelling.weights import Arrays


def export(config: RunConfig, family: ModelFamily, weights: Arrays, folder: str | Path) -> None:
    """Write weights, configuration and tokenizer to a folder that transformers loads.

    Without a tokenizer, because the hub cannot be reached, the model is written all the same. Of
    several processes, the first one writes.

    Args:
        weights: whole weights by logical name; each is read once.

    Raises:
        CheckpointError: the folder is there and not empty, or cannot be written.
    """
    if not is_heard():  # values that devices of all processes hold are read by all of them
        for name in weights:
            weights[name]
        return
    tokenizer = None
    try:
        tokenizer = load_tokenizer(config, family)
    except DataUnavailable as error:
        say(f"warning: no tokenizer is written: {error}")
    complete = None if tokenizer is None else tokenizer.save_pretrained
    files = family.weights(config).for_files(weights)
    write_hf_directory(folder, files, family.hf_config(config), complete=complete)
    say(f"wrote a model for Hugging Face to {folder}")


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and convert what --load names. No device is needed."""
    line = read_command_line(
        __doc__, "inference", "xxl_pod64", arguments, add_export_option, ORIGINS
    )
    if line.options.save_hf is None:
        raise ConfigError("there is nowhere to write to: give --save-hf DIR")
    config = line.config
    check_is_free(line.options.save_hf)
    with explained(line.preset, config):
        check_least(config)
    family = family_of(config)
    start = load_weights(config, family.weights(config))
    export(config, family, start.tensors, line.options.save_hf)


if __name__ == "__main__":
    sys.exit(main())
