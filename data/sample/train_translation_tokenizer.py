"""Train the tokenizer of the translations: `python -m data.sample.train_translation_tokenizer`.

NLLB's, with the three languages of the corpus.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import NllbTokenizer

from data.sample.generate_translations import (
    ENGLISH,
    FRENCH,
    GERMAN,
    generate_translation_rows,
)

FOLDER = Path(__file__).parent / "translation_tokenizer"
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
VOCABULARY_SIZE = 400


def build_tokenizer() -> NllbTokenizer:
    """Train a tokenizer on the training sentences; deterministic."""
    rows = list(generate_translation_rows("train"))
    texts = [row[side] for row in rows for side in ("source", "target")]
    trained = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS[-1], fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE, special_tokens=list(SPECIAL_TOKENS), show_progress=False
        ),
    )
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return NllbTokenizer(model["vocab"], merges, extra_special_tokens=[ENGLISH, GERMAN, FRENCH])


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files into `folder`."""
    build_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    write_tokenizer(parser.parse_args().folder)
