"""Training settings of objectives of labeled sequences."""

from __future__ import annotations

from dataclasses import dataclass

from config.training.common import CommonTraining


@dataclass(frozen=True)
class LabelTraining(CommonTraining):
    """Training settings of objectives of labeled sequences."""

    multi_label: bool | None = None
    """classification: a text can have several classes or none, each with its own probability. null:
    true if labels are lists."""
