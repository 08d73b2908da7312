"""Generate the sample of contrastive rows: `python -m data.sample.generate_retrieval`.

A question mentions two attributes of an event, the positive describes the event with one more, and
the negative with another value of one that was asked for. `corpus.jsonl` has other events.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from data.sample.generate import Premise, premise_to_text, scenes_of_split
from data.sample.generate_conversations import write_splits
from data.sample.vocabulary import ATTRIBUTES

SIZES = {"train": 512, "validation": 64, "corpus": 128}
SEED = 2029
NUM_TOLD_ATTRIBUTES = 3


def generate_retrieval_rows(split: str) -> Iterator[dict[str, str]]:
    """Generate rows with `anchor`, `positive` and `negative`."""
    rng = random.Random(f"{SEED}-{split}")
    for _ in range(SIZES[split]):
        event = _draw_event(rng, "train" if split == "train" else "validation")
        changed, other, _ = rng.sample(list(event.values), NUM_TOLD_ATTRIBUTES)
        asked = {name: event.values[name] for name in (changed, other)}
        values = [v for v in ATTRIBUTES[changed].possible_values if v != event.values[changed]]
        wrong = Premise(event.scene, {**event.values, changed: rng.choice(values)})
        question = premise_to_text(rng, Premise(event.scene, asked)).rstrip(".")
        yield {
            "anchor": f"Is it known that {question}?",
            "positive": premise_to_text(rng, event),
            "negative": premise_to_text(rng, wrong),
        }


def generate_corpus_rows() -> Iterator[dict[str, str]]:
    """Generate rows with `text`, each an event."""
    rng = random.Random(f"{SEED}-corpus")
    for _ in range(SIZES["corpus"]):
        yield {"text": premise_to_text(rng, _draw_event(rng, "validation"))}


def _draw_event(rng: random.Random, split: str) -> Premise:
    names = rng.sample(list(ATTRIBUTES), NUM_TOLD_ATTRIBUTES)
    attributes = {name: rng.choice(ATTRIBUTES[name].possible_values) for name in names}
    return Premise(rng.choice(scenes_of_split(split)), attributes)


def write_files(folder: Path) -> None:
    """Write `train.jsonl`, `validation.jsonl` and `corpus.jsonl`."""
    write_splits(folder, generate_retrieval_rows)
    lines = "".join(json.dumps(row) + "\n" for row in generate_corpus_rows())
    (folder / "corpus.jsonl").write_text(lines, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "retrieval")
    write_files(parser.parse_args().folder)
