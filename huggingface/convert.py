"""Convert a model folder with `pytorch_model.bin` files to safetensors, offline.

python3 -m huggingface.convert FOLDER NEW_FOLDER
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from files.formatting import format_names
from files.json_files import read_json_object
from huggingface.generation_config import read_generation_config
from huggingface.model_folders import check_can_write_folder_to, write_hf_directory
from huggingface.pytorch_bin_files import BinTensors
from huggingface.torch_model import require_torch
from terminal.entry_point import entry_point
from terminal.parser import Parser
from terminal.screen import say

COPIED_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""Files of the configuration, the tokenizer and its chat template."""


def convert_to_safetensors(folder: Path, target: Path) -> None:
    """Convert the model in `folder` to safetensors, written to the folder `target`.

    Raises:
        UserError: there are no such files, they cannot be read, or the new folder cannot be
            written.
    """
    check_can_write_folder_to(target)
    tensors = BinTensors(folder)
    if tensors.missing:
        say(f"left out, as no file has what the index names: {format_names(tensors.missing)}")
    hf_config = read_json_object(folder / "config.json").data

    def copy_other_files(draft: Path) -> None:
        for pattern in COPIED_FILES:
            for path in folder.glob(pattern):
                is_new = not (draft / path.name).exists()
                if path.is_file() and is_new and not path.name.startswith("pytorch_model"):
                    shutil.copy(path, draft)

    settings = read_generation_config(folder)
    write_hf_directory(target, tensors, hf_config, add_files=copy_other_files, generation=settings)
    say(f"wrote {len(tensors)} tensors to {target}")


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and convert the model folder."""
    parser = Parser.of_script(__doc__)
    parser.add_argument("folder", type=Path, help="a model with pytorch_model.bin")
    parser.add_argument("new", type=Path, help="a new folder")
    args = parser.parse_args(arguments)
    require_torch()
    convert_to_safetensors(args.folder, args.new)


if __name__ == "__main__":
    sys.exit(main())
