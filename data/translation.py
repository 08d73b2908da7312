"""Rows of translations: their languages, and the columns that hold the texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from config.sections import Data
from data.examples import Languages
from data.file_readers import DataError, Row
from data.prompt_template import ColumnError, Template
from files.formatting import format_value

TRANSLATION = "translation"
"""Column of `datasets`' type Translation: a text for each language."""

LANGUAGE_COLUMNS = (
    ("source_language", "source_lang", "src_lang"),
    ("target_language", "target_lang", "tgt_lang"),
)
"""Usual columns of the source's and the target's language."""


def with_language_columns(row: Row) -> Row:
    """Turn the texts in a column `translation` into a column for each language."""
    texts = row.get(TRANSLATION)
    if not isinstance(texts, Mapping):
        return row
    return {**{name: value for name, value in row.items() if name != TRANSLATION}, **texts}


@dataclass(frozen=True)
class TranslationLanguages:
    """Languages of a task's rows: a template each for source and target; None if unset."""

    templates: tuple[Template | None, Template | None] = (None, None)

    @classmethod
    def from_config(cls, data: Data) -> TranslationLanguages:
        """Create the languages of source and target texts that the configuration names.

        Raises:
            DataError: both are the same one.
            ValueError: a template cannot be read.
        """
        texts = data.source_language, data.target_language
        source, target = (None if text is None else Template(text) for text in texts)
        if source is not None and source == target and not source.columns:
            raise DataError(
                f"data.source_language and data.target_language are both {source.text}: a "
                "translation has two languages"
            )
        return cls((source, target))

    @property
    def fixed_languages(self) -> Languages:
        """Languages that are the same for all rows; None where they differ."""
        return Languages(
            *(None if t is None or t.columns else t.render({}) for t in self.templates)
        )

    def without_language_names(self, row: Row) -> Row:
        """The row without the columns that name its texts' languages."""
        names = {
            column
            for template, usual in zip(self.templates, LANGUAGE_COLUMNS, strict=True)
            for column in (usual if template is None else template.columns)
        }
        return {column: value for column, value in row.items() if column not in names}

    def row_languages(self, row: Row) -> Languages:
        """Source and target language of a row.

        Raises:
            ColumnError: a column is missing, or both are the same one.
        """
        languages = Languages(
            *(
                _row_language(row, usual) if template is None else template.render(row)
                for template, usual in zip(self.templates, LANGUAGE_COLUMNS, strict=True)
            )
        )
        if languages.source is not None and languages.source == languages.target:
            raise ColumnError(
                f"source and target are both in {format_value(languages.source)}: a translation "
                "has two languages"
            )
        return languages

    def find_text_templates(self, row: Row) -> tuple[Template | None, Template | None]:
        """Templates of the columns that are named like the two languages of all rows, if any.

        The column of `de_DE` is `de_DE` or `de`.
        """
        source, target = (_text_template(row, language) for language in self.fixed_languages)
        return source, target


USUAL_COLUMNS = TranslationLanguages()


def _row_language(row: Row, columns: tuple[str, ...]) -> str | None:
    values = (row[column] for column in columns if column in row)
    return next((value for value in values if isinstance(value, str)), None)


def _text_template(row: Row, language: str | None) -> Template | None:
    names = () if language is None else (language, re.split("[_-]", language)[0])
    name = next((name for name in names if name in row), None)
    return None if name is None else Template(f"{{{name}}}")
