"""Write the tables of docs/configuration.md, and the one of planned steps in docs/benchmarks.md.

    python3 -m docs.tables

A table stands there between `<!-- table: NAME -->` and `<!-- end -->`; this writes it anew, from
the configuration, or from benchmarks/results/planned_peers.json. A test fails where one is out of
date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from config.base import ConfigField, ConfigSection, config_fields
from config.families import FAMILIES, load_finetuning_config
from config.flags import shortest_flag
from config.presets import load_preset, preset_names
from config.sections import RunConfig
from config.unsupported_models import UNSUPPORTED

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "configuration.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewrite_tables(text: str) -> str:
    """Returns the Markdown document with its tables of fields and presets up to date."""
    documented: set[tuple[str, str]] = set()
    return _TABLE.sub(lambda match: match[1] + _create_table(match[2], documented) + match[3], text)


def _create_table(name: str, documented: set[tuple[str, str]]) -> str:
    """Returns the Markdown table of this name, such as "presets", a section or a model family.

    Args:
        documented: field names and meanings of the families' tables so far; it grows.
    """
    if name == "planned_peers":
        from benchmarks.peer_plans import format_plans, read_plans  # needs the planner

        return format_plans(read_plans(RESULTS))
    if name == "presets":
        return _preset_table()
    if name == "missing":
        listed = ((reason, kinds.replace(" ", ", ")) for reason, kinds in UNSUPPORTED.items())
        return format_markdown_table(("It is", "Kinds (`model_type`)"), listed)
    if name == "decoders":
        return format_markdown_table(HEAD, _without_repeats(_decoder_rows(), documented))
    if name in FAMILIES:
        listed_rows = () if name not in DECODERS else _decoder_rows()
        own_rows = [row for row in _family_rows(name) if row not in listed_rows]
        return format_markdown_table(HEAD, _without_repeats(own_rows, documented))
    rows = _field_rows(RunConfig).items()
    return format_markdown_table(
        HEAD, (row for dotted, row in rows if dotted.startswith(f"{name}."))
    )


# ---- fields -------------------------------------------------------------------------------------
HEAD = ("Flag and default", "Meaning")
DECODERS = ("gptj", "llama")
"""Families with fields that T5 lacks; those with the same default have a table of their own."""
_HF = re.compile(r" (HF|PEFT): .*")
"""End of a field's docstring, in `--help-all` alone: its name in others' files."""


def _field_rows(section: type[RunConfig]) -> dict[str, tuple[str, str]]:
    """Returns the Markdown table row (flag, meaning) of each config field, by dotted name."""
    default = section()  # once: it checks all values
    return {
        leaf.path: (
            f"`--{shortest_flag(leaf.path)}{_format_default(default, leaf)}`",
            _HF.sub("", leaf.doc),
        )
        for leaf in config_fields(section)
    }


def _family_rows(family: str) -> list[tuple[str, str]]:
    """Returns table rows of the configuration fields that are specific to a model family.

    Fields with another default in this family count; a meaning that all families share, or that a
    field of the same name has above, is left out.
    """
    shared, families, documented = _field_rows(RunConfig), [], set()
    for dotted, (flag, meaning) in _field_rows(FAMILIES[family].config).items():
        usual, named = shared.get(dotted, ("", "")), (dotted.rpartition(".")[2], meaning)
        if flag != usual[0]:
            families.append((flag, "" if meaning == usual[1] or named in documented else meaning))
        documented.add(named)
    return families


def _without_repeats(
    rows: Iterable[tuple[str, str]], documented: set[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield table rows without meanings that an earlier table gives a field of the same name."""
    for flag, meaning in rows:
        named = (flag.strip("`-").split()[0].rpartition(".")[2], meaning)
        yield flag, "" if named in documented else meaning
        documented.add(named)


def _decoder_rows() -> list[tuple[str, str]]:
    first, second = map(_family_rows, DECODERS)
    return [row for row in first if row in second]


def _format_default(default: ConfigSection, leaf: ConfigField) -> str:
    """Format a config field's default as it is written after a flag; "" for null."""
    value: object = default
    for name in leaf.path.split("."):
        value = getattr(value, name)
    match value:
        case None:
            return ""
        case bool():
            return f" {value}".lower()
        case str() if not value or " " in value:
            return f' "{value}"'
        case _:
            return f" {value}"


# ---- presets ------------------------------------------------------------------------------------
def _preset_table() -> str:
    """Returns the Markdown table of presets, without their FP8 variants."""
    head = ("Preset (dp × tp)", "Layers", "Features", "Type", "Micro-batch/batch")
    names = (name for name in preset_names("finetuning") if not name.endswith("_fp8"))
    return format_markdown_table(head, map(_preset_row, names))


def _preset_row(name: str) -> tuple[str, ...]:
    execution_values = load_preset("finetuning", name)["execution"]
    c = load_finetuning_config(name)
    model, execution = c.model, c.execution
    layout = [execution_values.get(field) for field in ("data_parallel", "tensor_parallel")]
    fixed_layout = f" ({' × '.join(map(str, layout))})" if all(layout) else ""
    return (
        f"`{name}`{fixed_layout}",
        f"{model.num_hidden_layers}",
        f"{model.hidden_size}",
        model.precision,
        f"{execution.micro_batch_size}/{c.training.global_batch_size}",
    )


# ---- Markdown -----------------------------------------------------------------------------------
def format_markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Returns a Markdown table of the rows, without bars at the ends of lines."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in cells) for cells in (head, *rows)]
    return "\n".join([lines[0], "|".join(["---"] * len(head)), *map(str.rstrip, lines[1:]), ""])


def main() -> None:
    """Update the tables in docs/configuration.md and docs/benchmarks.md."""
    for document in (DOCUMENT, BENCHMARKS):
        document.write_text(rewrite_tables(document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
