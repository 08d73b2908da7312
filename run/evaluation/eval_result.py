"""What an evaluation found: metrics, confused labels, examples of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from files.atomic_writing import write_text
from files.formatting import format_number
from run.evaluation.text_metrics import NO_LABEL

MAX_EXAMPLES = 20


@dataclass(frozen=True)
class Prediction:
    """What the model wrote for one example.

    Attributes:
        prompt: what it read.
        generated: what it wrote.
        expected: what it should have written.
    """

    prompt: str
    generated: str
    expected: str

    def to_dict(self) -> dict[str, str]:
        """It as JSON data."""
        return {"prompt": self.prompt, "expected": self.expected, "generated": self.generated}

    @property
    def right(self) -> bool:
        """Whether it is exactly what is expected, apart from surrounding space."""
        return self.generated.strip() == self.expected.strip()


@dataclass(frozen=True)
class EvalResult:
    """The outcome of an evaluation.

    Attributes:
        metrics: values by name.
        answers: to all examples; empty if no metric needs them.
        labels: of a labelling task.
        facts: further entries of the file, such as where the weights come from.
    """

    metrics: Mapping[str, float]
    answers: Sequence[Prediction]
    labels: Sequence[str] | None
    facts: Mapping[str, Any]

    @property
    def correct(self) -> int:
        """Number of right answers."""
        return sum(answer.right for answer in self.answers)

    def confusion_matrix(self) -> dict[str, dict[str, int]]:
        """How often a label (outer key) was answered by each label, or by none of them."""
        labels = self.labels or ()
        counts = {label: dict.fromkeys([*labels, NO_LABEL], 0) for label in labels}
        for answer in self.answers:
            said = answer.generated.strip()
            counts[answer.expected][said if said in labels else NO_LABEL] += 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """It as JSON data."""
        data: dict[str, Any] = {**self.facts, **self.metrics}
        if self.answers:
            data |= {"correct": self.correct, "total": len(self.answers)}
            if self.labels:
                data["confusion"] = self.confusion_matrix()
            wrong = [answer for answer in self.answers if not answer.right]
            data["errors"] = [answer.to_dict() for answer in wrong[:MAX_EXAMPLES]]
        return data

    def write(self, path: Path) -> None:
        """Write it into a file, whose folder is created if need be.

        Raises:
            WriteError: it cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        write_text("the report", path, text + "\n")

    def summary(self) -> str:
        """A line for each metric; exact answers are counted too."""
        lines = []
        for name, value in self.metrics.items():
            counts = f" ({self.correct}/{len(self.answers)})" if name in EXACT else ""
            lines.append(f"{name}: {format_number(value)}{counts}")
        return "\n".join(lines)


EXACT = ("accuracy", "exact_match")
