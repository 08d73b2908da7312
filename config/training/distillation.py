"""Training settings of distillation from a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.errors import ConfigError, ContradictionError
from config.training.common import CommonTraining
from config.values import Fraction, PathText, PositiveInt

MAX_TOP_K = 1024


@dataclass(frozen=True)
class DistillationTraining(CommonTraining):
    """Training settings of distillation from a teacher."""

    teacher: PathText | None = None
    """distill: the teacher, a Hugging Face model or a run, with the student's vocabulary."""

    teacher_quantization: Literal["int8", "int4"] | None = None
    """distill: weight quantization of the teacher. null: as in its run."""

    top_k: PositiveInt | None = 32
    """distill: likeliest tokens of the teacher stored per position, 6 bytes each. null: compare all
    tokens, by its last hidden states and its head."""

    distill_weight: Fraction = 0.5
    """distill: weight of the divergence from the teacher; 1 minus this is the cross-entropy's."""

    distill_rest: Literal["renormalise", "bin"] = "renormalise"
    """distill: renormalise the likeliest tokens' probabilities, or put all other tokens into one
    bin, which adds no bias."""

    teacher_cache: PathText | None = None
    """distill: folder of the teacher's outputs that runs can share. null: the run's own."""

    @property
    def has_teacher_head(self) -> bool:
        """True if the student's program has the teacher's head."""
        return self.objective == "distill" and self.top_k is None

    @property
    def rest_temperature(self) -> float:
        """Temperature at which the teacher's other tokens are summed up; 1 if they are not read."""
        return self.temperature if self.distill_rest == "bin" else 1.0

    def validate(self) -> None:
        super().validate()
        if self.objective == "distill" and self.teacher is None:
            raise ConfigError(
                f"{self.objective} learns from another model: give --training.teacher FOLDER"
            )
        if self.objective == "distill" and self.resolved_beta > 1:
            raise ConfigError(f"training.beta {self.resolved_beta:g} of distill must be at most 1")
        if self.top_k is None:
            if self.distill_rest == "bin":
                raise ContradictionError(
                    "training.distill_rest bin is for tokens outside the likeliest ones, but "
                    "training.top_k null compares all tokens",
                    {"training.distill_rest": "renormalise"},
                    "training.top_k",
                )
            return
        if self.objective == "distill" and self.beta and self.distill_rest != "bin":
            raise ContradictionError(
                "training.beta compares with the student's probability of all tokens: set "
                "training.distill_rest bin or training.top_k null",
                {"training.distill_rest": "bin"},
                "training.beta",
            )
        if self.top_k > MAX_TOP_K:
            raise ConfigError(
                f"training.top_k {self.top_k} must be at most {MAX_TOP_K}; null takes all tokens"
            )
