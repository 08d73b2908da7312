"""Write the sample data and tokenizers again, byte for byte.

python -m data.sample                          # all of them, into data/sample
python -m data.sample rollouts --folder DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from data.sample import (
    generate,
    generate_conversations,
    generate_preferences,
    generate_retrieval,
    generate_rollouts,
    generate_tasks,
    generate_translations,
    train_chat_tokenizer,
    train_gptj_tokenizer,
    train_tokenizer,
    train_translation_tokenizer,
)

GenerateRows = Callable[[str], Iterable[Mapping[str, Any]]]
"""Returns the rows of a split."""


def write_splits(sizes: Iterable[str], generate_rows: GenerateRows, folder: Path) -> None:
    """Write the rows of each split to a file of JSON Lines in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in sizes:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in generate_rows(split))
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


def save_tokenizer(build_tokenizer: Callable[[], Any], folder: Path) -> None:
    """Train a tokenizer and write its files into a folder."""
    build_tokenizer().save_pretrained(folder)


ROWS: Mapping[str, tuple[Iterable[str], GenerateRows]] = {
    ".": (generate.SIZES, generate.generate_examples),
    "summaries": (generate_tasks.SIZES, generate_tasks.generate_summary_rows),
    "conversations": (
        generate_conversations.SIZES,
        generate_conversations.generate_conversation_rows,
    ),
    "preferences": (generate_preferences.SIZES, generate_preferences.generate_preference_rows),
    "retrieval": (generate_retrieval.SIZES, generate_retrieval.generate_retrieval_rows),
    "rollouts": (generate_rollouts.SIZES, generate_rollouts.generate_rollout_rows),
    "translations": (generate_translations.SIZES, generate_translations.generate_translation_rows),
}
TOKENIZERS = {
    "t5_tokenizer": train_tokenizer,
    "gptj_tokenizer": train_gptj_tokenizer,
    "translation_tokenizer": train_translation_tokenizer,
    "chat_tokenizer": train_chat_tokenizer,
}
WRITERS: Mapping[str, Callable[[Path], object]] = {
    **{name: partial(write_splits, *of) for name, of in ROWS.items()},
    "places": generate_tasks.write_places,
    **{name: partial(save_tokenizer, of.build_tokenizer) for name, of in TOKENIZERS.items()},
}
"""By the name of the folder; the tokenizers are trained on the corpus in data/sample."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="FOLDER", help="some of the folders, . the corpus"
    )
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    for name in args.names or WRITERS:
        if name not in WRITERS:
            parser.error(f"{name} is none of the folders: {', '.join(WRITERS)}")
        WRITERS[name](args.folder / name)
