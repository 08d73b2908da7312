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
    """distill: the teacher, a Hugging Face model or a run of this program, with the student's
    vocabulary."""

    teacher_quantization: Literal["int8", "int4"] | None = None
    """distill: weight quantization of the teacher's linear layers. null: as its run had it."""

    top_k: PositiveInt = 32
    """distill: number of the teacher's likeliest tokens that are learned for each token; 6 bytes
    each on disk."""

    distill_weight: Fraction = 0.5
    """distill: weight of the divergence from the teacher; the labels' cross-entropy has the rest
    of 1."""

    distill_rest: Literal["renormalise", "bin"] = "renormalise"
    """distill: renormalise the probabilities of the likeliest tokens to add up to 1, or have all
    other tokens in one bin, which has no bias."""

    teacher_cache: PathText | None = None
    """distill: folder of the teacher's outputs, which runs can share. null: that of the run."""

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
        if self.objective == "distill" and self.beta and self.distill_rest != "bin":
            raise ContradictionError(
                "training.beta compares with the student's probability of all tokens: set "
                "training.distill_rest bin",
                {"training.distill_rest": "bin"},
                "training.beta",
            )
        if self.top_k > MAX_TOP_K:
            raise ConfigError(f"training.top_k {self.top_k} must be at most {MAX_TOP_K}")
