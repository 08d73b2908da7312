"""What a validation found: accuracy, which labels are taken for which, examples of errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from files.writing import write_text

FILE_NAME = "validation.json"
NO_LABEL = "no label"
MOST_EXAMPLES = 20


@dataclass(frozen=True)
class Answer:
    """What the model answered to one example.

    Attributes:
        prompt: what the model was asked.
        generated: text of the answer.
        expected: index of the right label.
        label: index of the label that the answer names; None if it names none.
    """

    prompt: str
    generated: str
    expected: int
    label: int | None


@dataclass(frozen=True)
class ValidationReport:
    """The outcome of a validation.

    Attributes:
        labels: their words, by index.
        answers: to all examples.
        facts: further entries of the file, such as where the weights come from.
    """

    labels: Sequence[str]
    answers: Sequence[Answer]
    facts: dict[str, Any]

    @property
    def correct(self) -> int:
        """Number of right answers."""
        return sum(answer.label == answer.expected for answer in self.answers)

    @property
    def accuracy(self) -> float:
        """Part of the answers that are right."""
        return self.correct / len(self.answers)

    def confusion(self) -> np.ndarray:
        """int [labels, labels + 1]: how often a label (row) was answered by each label (column).

        The last column counts answers that name no label.
        """
        count = len(self.labels)
        matrix = np.zeros((count, count + 1), int)
        for answer in self.answers:
            matrix[answer.expected, count if answer.label is None else answer.label] += 1
        return matrix

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        columns = [*self.labels, NO_LABEL]
        wrong = [answer for answer in self.answers if answer.label != answer.expected]
        return {
            **self.facts,
            "accuracy": self.accuracy,
            "correct": self.correct,
            "total": len(self.answers),
            "confusion": {
                label: dict(zip(columns, map(int, row), strict=True))
                for label, row in zip(self.labels, self.confusion(), strict=True)
            },
            "errors": [
                {"prompt": a.prompt, "expected": self.labels[a.expected], "generated": a.generated}
                for a in wrong[:MOST_EXAMPLES]
            ],
        }

    def write(self, directory: Path) -> Path:
        """Write validation.json into a directory, which is created if need be.

        Returns:
            The file's path.

        Raises:
            WriteError: it cannot be written.
        """
        path = directory / FILE_NAME
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        write_text("the report", path, text + "\n")
        return path

    def summary(self) -> str:
        """One line: accuracy and counts."""
        return f"accuracy: {self.accuracy:.4f} ({self.correct}/{len(self.answers)})"
