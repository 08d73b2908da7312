"""Config sections of a run: training, execution, checkpoints, evaluation and generation.

In the docstrings, HF is the name of the same setting in Hugging Face's model configuration. A
"scheduling hint" is a setting for Graphcore's hardware: it is accepted and shown with the program,
and XLA decides the matter itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from config.base import ConfigSection
from config.errors import ConfigError, did_you_mean
from config.objectives import METRICS, MetricName
from config.values import (
    Address,
    BeamCount,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PathText,
    PositiveFloat,
    PositiveInt,
    Proportion,
    split_names,
)

Device = Literal["auto", "cpu", "gpu", "tpu"]


@dataclass(frozen=True)
class Execution(ConfigSection):
    """Parallelism, memory placement and speed of a run.

    Results change by rounding only, unless dropout draws other masks, which depend on the
    micro-batch and the split of the batch.
    """

    micro_batch_size: PositiveInt = 1
    """Samples that one device computes at once."""

    data_parallel: PositiveInt = 1
    """Copies of the model that share the global batch. In training, a plan chooses this and
    `tensor_parallel` if neither is given."""

    tensor_parallel: PositiveInt = 1
    """Devices that share each layer of a copy of the model."""

    device_iterations: PositiveInt = 1
    """Optimizer steps run on the devices before they report to the host."""

    loss_scaling: PositiveFloat = 1.0
    """Factor on the loss, against underflow in float16; gradients are divided by it."""

    attention_serialisation: PositiveInt | Literal["auto"] = "auto"
    """Chunks of queries that attention computes in turn, to save memory. auto: more than 1 only
    where one sample does not fit otherwise."""

    attention: Literal["auto", "fused", "scores"] = "auto"
    """fused: compute scores in blocks and recompute them for the gradient. scores: all at once.
    auto: fused on GPUs and from 1,024 tokens on."""

    transpose_batch_sequence: bool = False
    """Hold activations as [sequence, batch, hidden]. Dropout draws other masks then."""

    expert_parallel: bool = False
    """Shard experts over the tensor-parallel devices as full experts, not inside each expert."""

    micro_batches_per_pass: PositiveInt | Literal["auto"] = "auto"
    """Micro-batches that run forward and backward through all layers before the next ones. All:
    each layer's weights are loaded once a step. 1: activations of one micro-batch are saved at a
    time. auto: the plan's choice; without a plan, 1 on one CPU device, else all."""

    activations: Literal["auto", "recompute", "keep"] = "auto"
    """Recompute activations for the backward pass, or keep them. auto: the plan's choice, else
    recompute."""

    placement: Literal["auto", "host"] = "auto"
    """State and activations on a GPU or TPU. auto: spare device memory holds what saves most time.
    host: all but resident_layers are in host memory."""

    update: Literal["auto", "end", "deferred"] = "auto"
    """When the optimizer updates a layer. end: after the backward pass. deferred: before the
    layer's next forward pass, which hides transfers. auto: deferred on a GPU or TPU, and with a
    disk."""

    resident_layers: NonNegativeInt = 0
    """Layers of each type whose weights, gradients and optimizer state stay in device memory.
    Placement is then host."""

    master_weights: bool = False
    """Keep a float32 master copy of 16-bit weights (4 bytes a weight) in place of stochastic
    rounding."""

    rts_weights_threshold: NonNegativeInt = 1024
    """Minimum elements of a variable to shard it over replicas with equal copies."""

    rts_activations: bool | Literal["auto"] = "auto"
    """Shard the activations between layers over the tensor-parallel devices. auto: the plan's
    choice, else true."""

    disk: PathText | None = None
    """Folder on a local disk for state that exceeds host memory; of this run alone. null: none."""

    quantized_cache: PathText | None = None
    """Folder of quantized frozen weights that runs of one model can share. null: the run's own."""

    host_memory: PositiveFloat | None = None
    """Gigabytes of host memory for a process; more state goes to `disk`. null: all that is free."""

    expert_groups: PositiveInt = 1
    """Groups into which a layer's experts are split and loaded in turn in training and evaluation,
    to save memory."""

    code_load: bool = False
    """Scheduling hint: load each layer's code from host memory when it is needed."""

    io_tiles: PositiveInt | None = None
    """Scheduling hint: tiles kept for streaming data."""

    available_memory_proportion: Fraction | None = None
    """Scheduling hint: fraction of a tile's memory for an op's temporaries."""

    device: Device = "auto"
    """Platform to run on. auto: the best one present."""

    @property
    def num_query_chunks(self) -> int:
        """Number of query chunks in attention; 1 if the planner chooses it."""
        slices = self.attention_serialisation
        return slices if isinstance(slices, int) else 1

    @property
    def shards_activations(self) -> bool:
        """True if activations between layers are sharded, or if the planner can choose it."""
        return self.rts_activations is not False


@dataclass(frozen=True)
class FP8(ConfigSection):
    """FP8 matmuls of linear layers (Micikevicius et al., arXiv:2209.05433)."""

    enabled: bool = False
    """Multiply inputs, weights and gradients of linear layers in FP8, with sums in float32."""

    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: e4m3 for inputs and weights, e5m2 for gradients; e4m3: for all."""

    recipe: Literal["delayed", "current"] = "delayed"
    """delayed: scales follow from the largest absolute values (amax) of past steps; current: of the
    operands."""

    amax_history_len: PositiveInt = 1024
    """delayed: number of steps whose amax is kept."""

    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """delayed: amax that sets the scale, the largest of the history or the most recent."""

    interval: PositiveInt = 1
    """delayed: optimizer steps between changes of the scales."""

    margin: NonNegativeInt = 0
    """Powers of two between the scaled amax and the largest number of the dtype."""

    power_of_2_scales: bool = True
    """Round scales down to powers of two, which multiply exactly."""

    head: bool = False
    """Multiply in FP8 in the head too."""


RANDOM = "random"
"""Random weights, in place of a model in `Checkpoint.load`."""


@dataclass(frozen=True)
class Checkpoint(ConfigSection):
    """Loading and saving of checkpoints."""

    load: PathText | None = None
    """Run, Hugging Face folder or hub name to load. Of a run the newest step; RUN/best and
    RUN/000001-step-100 name others. random or null: none."""

    save: PathText | None = None
    """Directory to save checkpoints in."""

    mirror: Address | None = None
    """Address to copy saved steps to in the background, such as s3://bucket/run."""

    steps: PositiveInt | None = None
    """Optimizer steps between checkpoints. null: as `minutes` says."""

    minutes: PositiveFloat | None = 10.0
    """Minutes between checkpoints. null: as `steps` says; without both, only at the end."""

    to_keep: PositiveInt = 4
    """Newest checkpoints to keep."""

    keep_best: MetricName | None = None
    """Metric of the validation split by which the best weights are kept in best/."""

    save_optimizer: bool = True
    """Save optimizer state, without which training cannot resume."""

    base_model: PathText | None = None
    """Folder of the base model, of frozen weights or of the reference, if it has moved."""

    load_optimizer: bool = True
    """Resume the run in `load`; false: a new run from its weights."""

    allow_nonfinite: bool = False
    """Load weights that contain NaN or infinity."""

    def validate(self) -> None:
        if self.mirror is not None and self.save is None:
            raise ConfigError("checkpoint.mirror copies what is saved: give --save a folder too")


@dataclass(frozen=True)
class Evaluation(ConfigSection):
    """Evaluation on the validation split, during training and after it."""

    steps: PositiveInt | None = None
    """Optimizer steps between evaluations. null: never."""

    samples: PositiveInt | None = None
    """Examples to evaluate on, the first of the split. null: all."""

    metrics: str | None = None
    """Metrics to compute, separated by commas; names as in checkpoint.keep_best. null: all that
    suit the task."""

    corpus: PathText | None = None
    """contrastive: file of more documents to retrieve from, in a column text. null: only the texts
    of the validation split."""

    constrained: bool = False
    """Answer with the label of data.class_labels that has the largest log-likelihood; false: with
    generated text."""

    log_samples: NonNegativeInt = 4
    """Answers that each evaluation in training logs."""

    patience: PositiveInt | None = None
    """Stop after this many evaluations without a better checkpoint.keep_best (null: loss). null:
    never."""

    def validate(self) -> None:
        for name in self.metric_names():
            if name not in METRICS:
                raise ConfigError(f"eval.metrics has {name!r}{did_you_mean(name, METRICS)}")
        if self.patience is not None and self.steps is None:
            raise ConfigError("eval.patience needs evaluations while training: set eval.steps")

    def metric_names(self) -> tuple[str, ...]:
        """Returns the names of the evaluation metrics in `metrics`."""
        return split_names(self.metrics)


SEARCH_FIELDS = {
    "sample": ("temperature", "top_k", "top_p", "seed"),
    "beam": ("num_beams", "length_penalty"),
}
"""Settings that one search alone has."""


@dataclass(frozen=True)
class Generation(ConfigSection):
    """Generation strategy, such as sampling or beam search, and its settings."""

    search: Literal["greedy", "sample", "beam"] = "greedy"
    """Take the likeliest token, draw one, or find the likeliest sequence."""

    weights: Literal["auto", "resident", "streamed"] = "auto"
    """resident: on the device. streamed: in host memory; each layer is loaded once for every
    position of a large batch. auto: resident if they fit."""

    micro_batches: PositiveInt | None = None
    """streamed: micro-batches per load of a layer, for each copy of the model. null: those of an
    optimizer step."""

    max_tokens: PositiveInt | None = None
    """Maximum number of generated tokens, the end token included. null: up to the model's sequence
    length."""

    temperature: NonNegativeFloat = 1.0
    """sample: divisor of the logits. 0: greedy."""

    top_k: PositiveInt | None = None
    """sample: number of likeliest tokens to draw from. null: all."""

    top_p: Proportion = 1.0
    """sample: draw from the likeliest tokens whose probabilities add up to this."""

    seed: NonNegativeInt = 42
    """sample: the same seed gives the same text, however prompts are shared out."""

    num_beams: BeamCount = 4
    """beam: sequences per prompt."""

    length_penalty: Number = 1.0
    """beam: divide a sequence's log-probability by its length to this power."""

    repetition_penalty: PositiveFloat = 1.0
    """Above 1: make tokens of the prompt and the answer less likely."""

    no_repeat_ngram_size: PositiveInt | None = None
    """Never repeat this many tokens in a row, those of a decoder's prompt included. null: no
    limit."""

    stop_strings: str | None = None
    """Texts that end an answer and stay in it, separated by commas. Escapes: \\n, \\, and \\\\."""

    def validate(self) -> None:
        if self.stop_strings is not None and not all(self.parse_stop_strings()):
            raise ConfigError(
                f"generation.stop_strings is {self.stop_strings!r}, of which a text is empty: an "
                "answer would end before it began"
            )

    def parse_stop_strings(self) -> tuple[str, ...]:
        """Returns the stop strings in `stop_strings`."""
        return () if self.stop_strings is None else _split_escaped(self.stop_strings)


def _split_escaped(text: str) -> tuple[str, ...]:
    """Returns the texts between commas; a backslash escapes a comma, and \\n is a line break."""
    texts = [""]
    for mark in re.findall(r"\\.|.", text, re.DOTALL):
        if mark == ",":
            texts.append("")
        else:
            texts[-1] += {r"\n": "\n", r"\t": "\t"}.get(mark, mark[-1])
    return tuple(texts)
