"""Training settings that all objectives have: steps, batch, trained weights, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from config.base import ConfigSection
from config.errors import ConfigError, ContradictionError
from config.lr_schedules import LRScheduleName
from config.objectives import OBJECTIVES, ROW_PAIRS, HeadType, ObjectiveName, RowType
from config.optimizer_state import OPTIMIZERS, RESIDUAL_SLOTS, Adafactor, OptimizerSpec, StateSlot
from config.values import (
    Fraction,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
)


@dataclass(frozen=True)
class LearningRate(ConfigSection):
    """Learning-rate schedule: linear warm-up from 0, then the schedule named by `function`."""

    function: LRScheduleName = "linear"
    """Schedule after the warm-up: linear or cosine decay to `minimum`; cosine_with_restarts:
    `num_cycles` times; wsd: decay at the end only; constant; relative: Adafactor's 1 / √step."""

    maximum: PositiveFloat = 1e-4
    """Learning rate at the end of the warm-up."""

    minimum: NonNegativeFloat = 0.0
    """Final learning rate of a decay. HF: min_lr."""

    warmup_steps: NonNegativeInt | None = None
    """Steps of the warm-up; overrides a preset's warmup_proportion."""

    warmup_proportion: Fraction | None = None
    """Fraction of training.steps, rounded up, for the warm-up; overrides a preset's warmup_steps.
    HF: warmup_ratio."""

    num_cycles: PositiveInt = 1
    """cosine_with_restarts: number of cycles."""

    decay_proportion: Fraction = 0.1
    """wsd: final fraction of training.steps with cosine decay."""

    start_step: NonNegativeInt = 0
    """Step at which the schedule starts, for the remaining steps."""

    def validate(self) -> None:
        if self.warmup_steps is not None and self.warmup_proportion is not None:
            raise ConfigError(
                f"learning_rate has warmup_steps {self.warmup_steps} and warmup_proportion "
                f"{self.warmup_proportion}, but one of them must be null"
            )
        if self.minimum > self.maximum:
            prefix = "training.optimizer.learning_rate"
            raise ContradictionError(
                f"learning_rate.minimum {self.minimum} must be at most its maximum {self.maximum}",
                {f"{prefix}.minimum": 0.0},
                f"{prefix}.maximum",
            )


@dataclass(frozen=True)
class Optimizer(ConfigSection):
    """Settings of the optimizer: AdamW (arXiv:1711.05101) or Adafactor (arXiv:1804.04235).

    AdamW has decoupled weight decay (Loshchilov and Hutter); Adafactor is by Shazeer and Stern.
    """

    name: Literal["adamw", "adafactor"] = "adamw"
    """Optimizer. adafactor: second moments are factored into rows and columns."""

    state: Literal["float32", "bfloat16", "8bit_residual8", "8bit_residual16"] = "float32"
    """Precision of the optimizer state. bfloat16: AdamW moments, rounded stochastically.
    8bit_residual8: 8-bit AdamW moments of matrices and an 8-bit residual per 16-bit weight instead
    of stochastic rounding; 8bit_residual16: a 16-bit residual."""

    learning_rate: LearningRate = field(default_factory=LearningRate)

    beta1: Probability = 0.9
    """adamw: decay of the moving average of gradients."""

    beta2: Probability = 0.999
    """adamw: decay of the moving average of squared gradients."""

    eps: PositiveFloat = 1e-8
    """adamw: added to the root of the second moment."""

    adafactor: Adafactor = field(default_factory=Adafactor)

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, multiplied by the learning rate."""

    gradient_clipping: PositiveFloat | None = 1.0
    """Maximum global norm of the gradients. null: no limit."""

    @property
    def registry_entry(self) -> OptimizerSpec:
        """The optimizer's entry in the registry."""
        return OPTIMIZERS[self.name]

    @property
    def is_8bit(self) -> bool:
        """True if the optimizer state is stored in 8 bits."""
        return self.state in RESIDUAL_SLOTS

    def state_slots(self, rank: int) -> tuple[StateSlot, ...]:
        """Returns the state slots of a weight with `rank` axes, without the step counter."""
        return self.registry_entry.slots_for(self, rank)


@dataclass(frozen=True)
class CommonTraining(ConfigSection):
    """Training settings that all objectives have."""

    steps: PositiveInt = 500
    """Number of optimizer steps."""

    epochs: PositiveFloat | None = None
    """Passes over the training data, also fractions; sets training.steps. Without both: three, of
    rollouts one."""

    global_batch_size: PositiveInt = 128
    """Samples of one optimizer step, over all devices."""

    stochastic_rounding: bool | None = None
    """Round updated 16-bit weights and state stochastically. null: where no master weight or
    residual keeps the rounding error."""

    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of stored gradients; within a pass of micro-batches they add up in float32. bfloat16:
    rounded once a pass, up or down by a hash of the value."""

    max_skipped_steps: NonNegativeInt = 10
    """Most steps in a row that may be skipped for a loss or gradient that is not finite; one more
    ends the run."""

    trainable: Names | None = None
    """Weights to train: Hugging Face's or PopXL's names, or prefixes that end before a dot,
    separated by commas; * matches any characters. null: all."""

    frozen: Names | None = None
    """Weights to freeze, in the syntax of `trainable`; takes precedence."""

    objective: ObjectiveName = "cross_entropy"
    """Loss, such as cross_entropy of the next token, or dpo. distill: also from a teacher. dpo,
    ipo, hinge, simpo, orpo, cpo: preference pairs; kto: single liked or disliked answers. grpo,
    dapo, dr_grpo, gspo, rloo: policy gradients from stored rollouts. classification, regression:
    labels of texts; reward: preference pairs, by a scalar head. contrastive: InfoNCE of
    embeddings."""

    label_smoothing: Fraction = 0.0
    """cross_entropy: share of the label's probability spread over the vocabulary, in training only;
    dpo, simpo, cpo: fraction of pairs assumed to be in the wrong order."""

    beta: NonNegativeFloat | None = None
    """Preferences: β of the loss (null: 0.1); orpo: weight of the odds ratio. Policy gradients:
    weight of the KL divergence from the initial model (null: 0, of rloo 0.05). distill: β of GKD's
    generalized JSD, at most 1 (null: 0, the forward KL divergence)."""

    temperature: PositiveFloat = 1.0
    """distill: softmax temperature of both models; the divergence is multiplied by its square.
    Policy gradients: temperature of sampling."""

    optimizer: Optimizer = field(default_factory=Optimizer)

    def validate(self) -> None:
        for setting in fields(self):
            readers = [name for name, spec in OBJECTIVES.items() if setting.name in spec.settings]
            value, default = getattr(self, setting.name), setting.default
            if readers and self.objective not in readers and value != default:
                raise ContradictionError(
                    f"training.{setting.name} is for {', '.join(readers)}, not for "
                    f"{self.objective}: leave it out",
                    {f"training.{setting.name}": default},
                    "training.objective",
                )

    @property
    def resolved_beta(self) -> float:
        """`beta`, or the objective's default."""
        return OBJECTIVES[self.objective].default_beta if self.beta is None else self.beta

    @property
    def row_type(self) -> RowType | None:
        """Type of the rows that the objective learns from; None: texts."""
        return OBJECTIVES[self.objective].row_type

    @property
    def learns_preferences(self) -> bool:
        """True if the objective compares answers."""
        return self.row_type in ("paired", "unpaired")

    @property
    def has_row_pairs(self) -> bool:
        """True if a row has two texts, a chosen and a rejected one."""
        return self.row_type in ROW_PAIRS

    @property
    def head(self) -> HeadType:
        """Head of the model that the objective trains."""
        return OBJECTIVES[self.objective].head

    @property
    def needs_whole_batch(self) -> bool:
        """True if the loss compares all samples of an optimizer step."""
        return OBJECTIVES[self.objective].needs_whole_batch

    @property
    def has_frozen_weights(self) -> bool:
        """True if at least one weight is frozen."""
        return self.trainable is not None or self.frozen is not None
