"""Train the tokenizer of the translations.

NLLB's, with the three languages of the corpus.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import NllbTokenizer

from data.sample.generate_translations import (
    ENGLISH,
    FRENCH,
    GERMAN,
    generate_translation_rows,
)

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
