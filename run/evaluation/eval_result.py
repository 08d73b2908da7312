"""Result of an evaluation: metrics, confusion matrix and examples of wrong predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from files.atomic_writing import write_text_atomically
from files.formatting import format_number
from run.evaluation.text_metrics import NO_LABEL

MAX_EXAMPLES = 20


@dataclass(frozen=True)
class Prediction:
    """Generated and expected answer of one example.

    Attributes:
        prompt: the example's prompt.
        generated: the model's answer.
        expected: the target.
    """

    prompt: str
    generated: str
    expected: str

    def to_dict(self) -> dict[str, str]:
        """Return the prediction as JSON data."""
        return {"prompt": self.prompt, "expected": self.expected, "generated": self.generated}

    @property
    def is_correct(self) -> bool:
        """True if the answer is exactly the expected one, apart from surrounding space."""
        return self.generated.strip() == self.expected.strip()


@dataclass(frozen=True)
class EvalResult:
    """Metrics and predictions of an evaluation.

    Attributes:
        metrics: values by name.
        answers: predictions for all examples; empty if no metric needs them.
        labels: class labels; None if the task is no classification.
        facts: further entries of eval.json, such as the source of the weights.
    """

    metrics: Mapping[str, float]
    predictions: Sequence[Prediction]
    labels: Sequence[str] | None
    info: Mapping[str, Any]

    @property
    def num_correct(self) -> int:
        """Number of predictions that equal the expected answer."""
        return sum(answer.is_correct for answer in self.predictions)

    def confusion_matrix(self) -> dict[str, dict[str, int]]:
        """Count predictions by expected (outer key) and predicted class label, or `NO_LABEL`."""
        labels = self.labels or ()
        counts = {label: dict.fromkeys([*labels, NO_LABEL], 0) for label in labels}
        for answer in self.predictions:
            predicted = answer.generated.strip()
            counts[answer.expected][predicted if predicted in labels else NO_LABEL] += 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics and predictions as JSON data."""
        data: dict[str, Any] = {**self.info, **self.metrics}
        if self.predictions:
            data |= {"correct": self.num_correct, "total": len(self.predictions)}
            if self.labels:
                data["confusion"] = self.confusion_matrix()
            wrong = [answer for answer in self.predictions if not answer.is_correct]
            data["errors"] = [answer.to_dict() for answer in wrong[:MAX_EXAMPLES]]
        return data

    def write(self, path: Path) -> None:
        """Write metrics and predictions to a JSON file, creating its folder if needed.

        Raises:
            WriteError: the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        write_text_atomically("the report", path, text + "\n")

    def summary(self) -> str:
        """Format one line of text per metric, with counts for accuracy and exact match."""
        lines = []
        for name, value in self.metrics.items():
            counts = ""
            if name in EXACT and self.predictions:
                counts = f" ({self.num_correct}/{len(self.predictions)})"
            lines.append(f"{name}: {format_number(value)}{counts}")
        return "\n".join(lines)


EXACT = ("accuracy", "exact_match")
