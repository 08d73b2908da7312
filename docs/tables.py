"""The tables of fields and presets in the documentation, made from the configuration itself.

    python3 -m docs.tables

A table stands in a document between `<!-- table: NAME -->` and `<!-- end -->`; this writes it anew.
A test fails where one is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from config.base import Leaf, Section, leaves
from config.families import FAMILIES, config_class_of
from config.flags import flag_of
from config.presets import load_config, preset_data, preset_names
from config.sections import RunConfig

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "configuration.md")
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """A document with all its tables as they should be."""
    return _TABLE.sub(lambda match: match[1] + _table_of(match[2]) + match[3], text)


def _table_of(name: str) -> str:
    """The table called `name`: "presets", a section's name, or a model family's."""
    if name == "presets":
        return _presets()
    if name in FAMILIES:
        return _fields(FAMILIES[name].config, _is_particular(FAMILIES[name].config))
    return _fields(RunConfig, lambda leaf: leaf.dotted.split(".")[0] == name)


# ---- fields -------------------------------------------------------------------------------------
def _fields(section: type[RunConfig], shown: Callable[[Leaf], bool]) -> str:
    rows = (
        (f"`--{flag_of(leaf.dotted)}`", f"`{_default(section, leaf)}`", leaf.doc)
        for leaf in leaves(section)
        if shown(leaf)
    )
    return _markdown(("Flag", "Default", "Meaning"), rows)


def _is_particular(family: type[RunConfig]) -> Callable[[Leaf], bool]:
    """Which fields of a family no other family has, or have another default there."""
    shared = {leaf.dotted: _default(RunConfig, leaf) for leaf in leaves(RunConfig)}
    return lambda leaf: shared.get(leaf.dotted) != _default(family, leaf)


def _default(section: type[Section], leaf: Leaf) -> str:
    value: object = section()
    for name in leaf.dotted.split("."):
        value = getattr(value, name)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- presets ------------------------------------------------------------------------------------
def _presets() -> str:
    head = ("Preset", "Layers × features", "Type", "Devices (dp × tp)",
            "Global batch = micro × accumulation × dp", "Data")  # fmt: skip
    return _markdown(head, map(_preset_row, preset_names("finetuning")))


def _preset_row(name: str) -> tuple[str, ...]:
    c = load_config(config_class_of(preset_data("finetuning", name), name), "finetuning", name)
    model, execution = c.model, c.execution
    dp, tp, micro = execution.data_parallel, execution.tensor_parallel, execution.micro_batch_size
    batch = f"{c.training.global_batch_size} = {micro} × {c.gradient_accumulation} × {dp}"
    return (
        f"`{name}`",
        f"{model.layers} × {model.hidden_size}",
        model.precision,
        f"{c.replicas} ({dp} × {tp})",
        batch,
        c.data.dataset,
    )


# ---- Markdown -----------------------------------------------------------------------------------
def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def lines() -> Iterator[str]:
        for cells in (head, ("---",) * len(head), *rows):
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    return "".join(lines())


def main() -> None:
    """Write the tables of all documents."""
    for path in DOCUMENTS:
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
