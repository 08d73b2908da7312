"""Automatic values of configuration fields that neither the user nor a preset set.

Values that the user set stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import popdist
import popxl
from config.base import flatten_by_path, nest_by_path
from config.config_sources import (
    BATCH,
    COPIES,
    EPOCHS,
    GROUPS,
    LAYOUT,
    MICRO,
    PLAN,
    ConfigSource,
    LayeredConfig,
    largest_divisor,
)
from config.errors import ConfigError
from config.process_checks import check_same_run_on_all_processes
from config.sections import RunConfig
from data.sample_format import SampleFormat, length_multiple
from data.seq2seq import SEQ2SEQ
from modelling.devices import resolve_device_desc
from modelling.model_family import get_family
from planning.hardware.machines import Machine, machine, machine_for_device_kind
from planning.hardware.memory_check import available_host_bytes
from planning.hardware.resource_errors import explain_resource_errors
from planning.program_variants import VariantCache, plans_placement
from popxl import hardware
from terminal.command_line import CommandLine
from terminal.screen import say

if TYPE_CHECKING:
    from data.data_cache import DataCache
    from data.length_stats import LengthStats
    from data.task import Split

MAX_SAMPLE_TOKENS = 2048
"""Largest number of tokens of a sample that is chosen."""

MAX_CONTEXT = 2**17
"""Largest context length, prompt and answer together, that is chosen for generation."""

DEFAULT_NEW_TOKENS = 256
"""Tokens of an answer, and of a typical prompt, without data to measure."""

DEFAULT_BATCH_SIZE, MIN_BATCH_SIZE, MIN_STEPS_PER_EPOCH = 32, 8, 20
"""Samples of an optimizer step; down to the minimum if an epoch would have too few steps."""

TARGET_TOKENS = {"cpu": 2**12, "gpu": 2**14, "tpu": 2**14}
"""Tokens of a micro-batch that keep a device busy, by platform."""

LEARNING_RATES = {
    "seq2seq": ((1.5e8, 3e-4), (5e8, 1e-4), (1.5e9, 5e-5), (5e9, 1e-5), (float("inf"), 5e-6)),
    "causal_lm": ((1.5e8, 1e-4), (5e8, 5e-5), (1.5e9, 2e-5), (5e9, 1e-5), (float("inf"), 5e-6)),
}
"""Learning rates of full fine-tuning with AdamW by sample format: pairs (parameters, learning rate)
for models with fewer parameters, as in the presets."""

ADAPTER_LEARNING_RATE = 2e-4
"""Learning rate of adapters, for any model."""

PREFERENCE_FACTOR = 0.05
"""Factor on the learning rate of preference training, which drifts from the reference soon."""

WARMUP_PROPORTION = 0.1

MIN_GAIN = 0.02
"""Smallest fraction of the time for whose gain another micro-batch size is chosen."""


@dataclass(frozen=True)
class AvailableDevices:
    """Platform, number and memory of the devices for which a configuration is completed.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        bfloat16: true if the devices multiply bfloat16 at full rate.
        count: number of devices of all processes.
        memory: bytes of a device, or of the host whose memory it shares.
        machine: the machine for simulated runs; None: devices share the host's memory.
    """

    platform: str
    bfloat16: bool
    count: int
    memory: float
    machine: Machine | None = None

    @classmethod
    def from_machine(cls, machine: Machine) -> AvailableDevices:
        """Return the devices of one host of a machine that the hardware table lists."""
        accelerated = machine.platform != "cpu"
        count = (machine.devices or 1) if accelerated else 1
        target_machine = machine if accelerated else None
        bfloat16 = accelerated and machine.flops["bfloat16"] >= machine.flops["float16"]
        return cls(machine.platform, bfloat16, count, machine.usable_bytes, target_machine)

    @classmethod
    def from_local_machine(cls, config: RunConfig) -> AvailableDevices:
        """Return the devices of this computer that a configuration selects.

        Raises:
            DeviceError: there is none of the configured platform.
        """
        desc, instances = resolve_device_desc(config), popdist.getNumInstances()
        platform = hardware.platform(desc)
        count = (1 if platform == "cpu" else hardware.device_count(desc)) * instances
        memory = popxl.plan.device_memory(desc, 1) or (available_host_bytes() or 2**34) / 2
        min_memory = min(popdist.all_gather_object(memory))  # all processes choose equally
        target_machine = None
        if platform != "cpu":
            kind = hardware.device_kinds(desc, 1)[0]
            listed = machine_for_device_kind(kind) or machine("h100")
            local = hardware.device_count(desc)
            if instances > 1:  # each may have a part of a host's devices
                local = max(local, listed.devices or 1)
            host = min(popdist.all_gather_object(available_host_bytes() or listed.host_memory))
            target_machine = replace(
                listed.with_usable_bytes(min_memory), devices=local, host_memory=host
            )
        return cls(platform, hardware.has_bfloat16(desc), count, min_memory, target_machine)


@dataclass(frozen=True)
class AutoConfig:
    """A configuration with unset automatic fields, for which values are being chosen.

    Attributes:
        devices: the devices of the run.
        target_micro_batch: samples of a micro-batch that keep a device busy; None: the configured
            number.
        simulated: simulated samples per second by micro-batch size.
    """

    settings: LayeredConfig
    devices: AvailableDevices
    target_micro_batch: int | None = None
    simulated: Mapping[int, float] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        """The run configuration with all automatic values that have been chosen so far."""
        return self.settings.config

    @property
    def set_names(self) -> frozenset[str]:
        """Dotted names of the fields that the user or a preset has set."""
        return self.settings.explicit_names

    def with_values(self, **fields: Any) -> AutoConfig:
        """Return a copy with more automatic values, by dotted field name with `__` for the dots."""
        named = {name.replace("__", "."): value for name, value in fields.items()}
        return replace(self, settings=self.settings.with_auto_values(named))


def resolve_auto_fields(
    line: CommandLine,
    splits: Sequence[Split] = (),
    trains: bool = False,
    only_plans: bool = False,
    machine: Machine | None = None,
    count: int | None = None,
    data_cache: DataCache | None = None,
    programs: VariantCache | None = None,
) -> CommandLine:
    """Choose values for the fields that a command line leaves unset, and print them.

    With a preset, only an open parallel layout is chosen.

    Args:
        splits: the data splits that are read; none: prompts are not known yet.
        trains: choose for training on the first split.
        only_plans: data may be missing.
        machine: the machine to choose for; None: the local one.
        count: devices to use; None: all of the machine.
        data_cache: cache for the data that are read.
        programs: cache of traced programs.

    Raises:
        UserError: data are not named or not available, or there is no such device.
    """
    settings, shares = line.settings, trains and line.settings.planner_chooses_layout
    if not settings.needs_auto_values(trains):
        return line
    check_same_run_on_all_processes(
        line.config, **{"the settings that are given": sorted(settings.explicit_names)}
    )
    answers = not splits and not trains
    if settings.has_auto_fields and not _has_explicit_data(settings.explicit_names, splits):
        if not only_plans:
            raise ConfigError(
                f"nothing says which data to take: give --data.{splits[0]} FILE, or --dataset "
                "sample or mnli"
            )
        splits = ()
    if trains and splits and line.config.data.validation is not None:
        splits = (*splits, "validation")
    programs = programs or VariantCache()
    with explain_resource_errors(line.preset, line.config):
        devices = (
            AvailableDevices.from_local_machine(line.config)
            if machine is None
            else AvailableDevices.from_machine(machine)
        )
        choices = AutoConfig(settings, devices if count is None else replace(devices, count=count))
        if settings.has_auto_fields:
            choices = _choose_auto_fields(choices, splits, trains, data_cache, answers)
        if shares:
            choices = _with_parallel_layout(choices, line.preset, programs)
        if settings.has_auto_fields and trains:
            choices = _with_micro_batch_size(choices, programs)
    if summary := _format_auto_values(choices, trains):
        say(summary)
    return replace(line, config=choices.config, settings=choices.settings)


def _choose_auto_fields(
    choices: AutoConfig,
    splits: Sequence[Split],
    trains: bool,
    data_cache: DataCache | None,
    answers: bool,
) -> AutoConfig:
    """Choose lengths, fine-tuning defaults, batch size and expert groups, one after the other."""
    # A preset has them all, and does without.
    from data.data_cache import DataCache
    from data.length_stats import measure_lengths
    from data.pipeline import Pipeline
    from planning.expert_group_count import min_expert_groups

    config = choices.config
    sample_format = get_family(config).sample_format
    bits = "bfloat16" if choices.devices.bfloat16 else "float32"
    choices = choices.with_values(model__precision=bits)
    data = Pipeline(choices.config, sample_format, data_cache or DataCache()) if splits else None
    lengths = None if data is None else measure_lengths(data, splits)
    if answers:
        choices = _with_answer_lengths(choices, sample_format)
    else:
        choices = _with_training_lengths(choices, sample_format, lengths)
    if trains:
        is_plain = data is not None and data.task.row_format == "language_modeling"
        choices = choices.with_values(
            **_finetuning_defaults(choices.config, sample_format, is_plain)
        )
    choices = _with_batch_size(
        choices, sample_format, lengths if trains else None, lengths is not None
    )
    if not trains:
        return choices
    groups = min_expert_groups(choices.config, choices.devices.memory)
    return choices.with_values(execution__expert_groups=groups)


def _has_explicit_data(set_names: frozenset[str], splits: Sequence[Split]) -> bool:
    """Return True if the user or a preset names the data of `splits`."""
    return not splits or bool(
        {"data.dataset", "data.train", *(f"data.{split}" for split in splits)} & set_names
    )


def _with_training_lengths(
    choices: AutoConfig, sample_format: SampleFormat, lengths: LengthStats | None
) -> AutoConfig:
    """Set the maximum sequence lengths to the longest in the data, within `MAX_SAMPLE_TOKENS`."""
    config = choices.config
    limit = min(MAX_SAMPLE_TOKENS, _context_length(config)) * config.texts_per_example
    multiple = length_multiple(config)

    def round_up_to_multiple(tokens: int) -> int:
        """Round tokens up to a multiple of `multiple`, within `limit`."""
        return max(min(ceil(tokens / multiple) * multiple, limit // multiple * multiple), multiple)

    new_tokens = round_up_to_multiple(
        min(DEFAULT_NEW_TOKENS, limit // 2) if lengths is None else lengths.target
    )
    sequence_length = round_up_to_multiple(
        (limit - new_tokens) if lengths is None else lengths.longest
    )
    fields = {
        "model__sequence_length": sequence_length,
        f"model__{sample_format.output_field}": new_tokens,
    }
    return choices.with_values(**fields)


def _with_answer_lengths(choices: AutoConfig, sample_format: SampleFormat) -> AutoConfig:
    """Set the maximum prompt length so that prompt and generated answer fit the context length."""
    default = min(DEFAULT_NEW_TOKENS, _context_length(choices.config) // 2)
    choices = choices.with_values(**{f"model__{sample_format.output_field}": default})
    config = choices.config
    new_tokens = config.generation.max_tokens or sample_format.output_length(config)
    sequence_length = _max_prompt_length(config, _context_length(config), new_tokens)
    return choices.with_values(model__sequence_length=sequence_length)


def _max_prompt_length(config: RunConfig, limit: int, new_tokens: int) -> int:
    """Return the largest prompt length that leaves `new_tokens` tokens of a context of `limit`."""
    multiple = length_multiple(config)
    return max((limit - new_tokens) // multiple, 1) * multiple


def with_generation_lengths(line: CommandLine) -> CommandLine:
    """Set the maximum prompt and answer lengths for generation with the model of a saved run.

    The run's lengths follow from its training data. For generation a prompt may fill the model's
    context, and answers to a user's data are not truncated earlier.
    """
    config, (run, *over) = line.config, line.settings.sources
    flags = [flatten_by_path(layer.values) for layer in over]
    of_run = run.is_exhaustive and any(f.get("checkpoint.load") == run.name for f in flags)
    set_names, sample_format = set[str]().union(*flags), get_family(config).sample_format
    shares = (
        sample_format is SEQ2SEQ and "data.examples_per_sample" in set_names
    )  # prompts share samples
    if not of_run or line.preset != run.name or shares:
        return line
    limit = max(_context_length(config), config.model.sequence_length)
    new_tokens = sample_format.max_new_tokens(config)
    if config.data.train is not None and config.generation.max_tokens is None:
        new_tokens = min(max(new_tokens, DEFAULT_NEW_TOKENS), limit // 2)
    sequence_length = _max_prompt_length(config, limit, new_tokens)
    if sample_format is SEQ2SEQ:  # the decoder's tokens take no space in the encoder
        sequence_length = max(sequence_length, config.model.sequence_length)
    fields = {"model.sequence_length": sequence_length, "generation.max_tokens": new_tokens}
    if sample_format is SEQ2SEQ:
        fields["data.examples_per_sample"] = 1
    new = {name: value for name, value in fields.items() if name not in set_names}
    return replace(line, config=config.with_values(new))


def _context_length(config: RunConfig) -> int:
    """Return the tokens of the model's context or `MAX_SAMPLE_TOKENS`; at most `MAX_CONTEXT`."""
    return min(MAX_CONTEXT, config.model.max_position_embeddings or MAX_SAMPLE_TOKENS)


def _finetuning_defaults(
    config: RunConfig, sample_format: SampleFormat, is_plain: bool
) -> dict[str, Any]:
    """Return fine-tuning's usual values, by dotted name, of fields with other defaults.

    Args:
        is_plain: the data are documents, of which all tokens count in the loss.
    """
    size = config.min_num_weights()
    default = next(rate for limit, rate in LEARNING_RATES[sample_format.name] if size < limit)
    rate = ADAPTER_LEARNING_RATE if config.adapter.rank else default
    drifts = config.training.learns_preferences or config.training.row_type == "rollout"
    rate *= PREFERENCE_FACTOR if drifts else 1
    loss_setting = (
        {} if sample_format is SEQ2SEQ else {"data__loss_on": "all" if is_plain else "completion"}
    )
    prefix = "training__optimizer__learning_rate"
    return {
        f"{prefix}__maximum": rate,
        f"{prefix}__warmup_proportion": WARMUP_PROPORTION,
        **loss_setting,
    }


def _with_batch_size(
    choices: AutoConfig, sample_format: SampleFormat, lengths: LengthStats | None, measured: bool
) -> AutoConfig:
    """Set the samples per global batch and micro-batch, and the data parallelism.

    Args:
        lengths: length statistics of the training data; None: not for training.
        measured: true if the sequence length is that of data.
    """
    e, set_names = choices.config.execution, choices.set_names
    batch_size = None
    if "training.global_batch_size" in set_names:
        batch_size = choices.config.training.global_batch_size
    dp = e.data_parallel
    if "execution.data_parallel" not in set_names:
        dp = _max_data_parallel(choices, batch_size)
    per_replica = (batch_size or _default_batch_size(choices.config, lengths)) // dp or 1
    if "execution.micro_batch_size" in set_names:
        micro = e.micro_batch_size
        per_replica = max(per_replica // micro, 1) * micro
    else:
        limit = _max_micro_batch_size(choices, sample_format, measured)
        choices = replace(choices, target_micro_batch=limit)
        per_replica = per_replica if batch_size else 1 << per_replica.bit_length() - 1
        micro = largest_divisor(per_replica, limit)
    return choices.with_values(
        training__global_batch_size=per_replica * dp,
        execution__micro_batch_size=micro,
        execution__data_parallel=dp,
    )


def _with_parallel_layout(choices: AutoConfig, name: str, programs: VariantCache) -> AutoConfig:
    """Set the data and tensor parallelism of the fastest simulated step that fits; print it.

    Without simulated steps it is data parallel, as far as the batch divides.

    Args:
        name: name of the configuration in messages.
    """
    config, devices, target_machine = choices.config, choices.devices, choices.devices.machine
    if devices.count == 1:
        return choices
    from planning.fit_search import plan_best_training  # one device does without
    from planning.parallel_layouts import list_layouts

    micro = choices.target_micro_batch or config.execution.micro_batch_size
    configs = list_layouts(
        config, devices.count, None if choices.settings.is_set_by_flag(MICRO) else micro
    )
    best = (
        configs[0]
        if target_machine is None
        else plan_best_training(name, configs, target_machine, programs).requirements.config
    )
    e = best.execution
    sizes = e.data_parallel, e.tensor_parallel, e.micro_batch_size, e.expert_groups
    values = dict(zip((*LAYOUT, MICRO, GROUPS), sizes, strict=True))
    settings = choices.settings.with_auto_values(values)
    by_plan = {n: v for n, v in values.items() if n in LAYOUT or not settings.has_auto_fields}
    settings = settings.with_sources(ConfigSource(PLAN, nest_by_path(by_plan)))
    unused = (
        "" if best.num_replicas == devices.count else f" of {devices.count}, which cannot share it"
    )
    say(
        f"devices: {best.num_replicas} = {e.data_parallel} dp × {e.tensor_parallel} tp{unused}, "
        f"micro-batches of {e.micro_batch_size} (--data_parallel and --tensor_parallel change it)"
    )
    return replace(choices, settings=settings)


def _with_micro_batch_size(choices: AutoConfig, programs: VariantCache) -> AutoConfig:
    """Set another micro-batch size if its simulated step is faster by at least `MIN_GAIN`.

    Larger micro-batches read weights less often, and take memory that could hold state. Larger ones
    are tried as long as they are faster, and a smaller one if none is.
    """
    config, target_machine = choices.config, choices.devices.machine
    if (
        "execution.micro_batch_size" in choices.set_names
        or target_machine is None
        or not plans_placement(config)
    ):
        return choices
    default_size = config.execution.micro_batch_size
    half_size = config.execution.micro_batch_size // 2
    per_replica = config.gradient_accumulation * default_size

    def simulate_seconds(n: int) -> float:
        candidate = choices.with_values(execution__micro_batch_size=n).config
        return _simulated_seconds(candidate, target_machine, programs)

    runs = {default_size: simulate_seconds(default_size)}
    for n in (2 * default_size, 4 * default_size):
        if per_replica % n or runs[n // 2] == inf:  # larger ones do not fit either
            break
        runs[n] = simulate_seconds(n)
        if runs[n] >= runs[n // 2]:
            break
    if (
        half_size
        and per_replica % half_size == 0
        and runs.get(2 * default_size, inf) >= runs[default_size]
    ):
        runs[half_size] = simulate_seconds(half_size)
    best = min(runs, key=runs.__getitem__)
    if runs[best] > (1 - MIN_GAIN) * runs[default_size]:
        best = default_size
    samples = config.training.global_batch_size * config.execution.device_iterations
    rates = {n: samples / time for n, time in runs.items() if time < inf}
    return replace(choices.with_values(execution__micro_batch_size=best), simulated=rates)


def _simulated_seconds(config: RunConfig, target_machine: Machine, programs: VariantCache) -> float:
    """Return a training step's simulated seconds; infinity if the program exceeds memory."""
    from planning.placement_search import may_fit, search_placement

    micro_batches = config.gradient_accumulation
    execution = replace(
        config.execution, activations="recompute", micro_batches_per_pass=micro_batches
    )
    recomputing = replace(config, execution=execution)
    variants = programs.variants(config, target_machine.target)
    if not may_fit(variants, config, target_machine):
        return inf
    best = search_placement(variants, recomputing, target_machine).best
    return best.seconds if best.fits else inf


def _default_batch_size(config: RunConfig, lengths: LengthStats | None) -> int:
    """Return the default number of samples of a global batch, from the lengths of the data."""
    if lengths is None:
        return DEFAULT_BATCH_SIZE
    per_sample = getattr(config.data, "examples_per_sample", 1)
    packed = lengths.examples * lengths.mean / config.model.sequence_length
    samples = max(packed, lengths.examples / per_sample)
    size = DEFAULT_BATCH_SIZE
    while size > MIN_BATCH_SIZE and samples / size < MIN_STEPS_PER_EPOCH:
        size //= 2
    return size


def _max_data_parallel(choices: AutoConfig, batch: int | None) -> int:
    """Return the data parallelism: the largest divisor of `batch` that the devices allow."""
    limit = max(choices.devices.count // choices.config.execution.tensor_parallel, 1)
    if batch is None:
        return limit
    return largest_divisor(batch, limit)


def _max_micro_batch_size(choices: AutoConfig, sample_format: SampleFormat, measured: bool) -> int:
    """Return the samples of a micro-batch that busy a device within a quarter of its memory."""
    config, length = choices.config, choices.config.model.sequence_length
    if not measured:
        config = config.with_values(
            {"model.sequence_length": min(length, MAX_SAMPLE_TOKENS - DEFAULT_NEW_TOKENS)}
        )
    typical = length if measured else min(length, DEFAULT_NEW_TOKENS)
    tokens = TARGET_TOKENS[choices.devices.platform] // typical
    return int(
        max(min(tokens, choices.devices.memory / 4 / _bytes_per_sample(config, sample_format)), 1)
    )


def _bytes_per_sample(config: RunConfig, sample_format: SampleFormat) -> float:
    """Estimate a sample's float32 activation bytes, in a layer's backward pass or the loss."""
    m = config.model
    layer = m.sequence_length * m.hidden_size * 40
    squares = 3 * config.num_attention_heads * m.sequence_length**2
    scores = squares // config.execution.num_query_chunks
    logits = 3 * sample_format.count_predicted_positions(config) * m.output_vocab_size
    return 4.0 * max(layer + scores, logits) / config.execution.tensor_parallel


def _format_simulated_step(choices: AutoConfig) -> str:
    """Format the simulated samples per second of each micro-batch size, for a message."""
    if not choices.simulated:
        return ""
    rates = ", ".join(f"{rate:,.1f} with {n}" for n, rate in sorted(choices.simulated.items()))
    return f" (simulated samples/s: {rates})"


def _format_auto_values(choices: AutoConfig, trains: bool) -> str | None:
    """Format the automatically chosen values in one line; None if none was chosen."""
    c, chosen = choices.config, choices.settings.auto_values_in_use
    items = [
        text
        for fields, text in _auto_value_texts(c, trains, _format_simulated_step(choices))
        if fields & chosen.keys()
    ]
    return f"chosen: {', '.join(items)} (flags change it)" if items else None


def _auto_value_texts(config: RunConfig, trains: bool, reason: str) -> list[tuple[set[str], str]]:
    """List groups of automatically chosen fields, each with a text that shows their values."""
    e, t, output = config.execution, config.training, get_family(config).sample_format.output_field
    sequence_length = f"sequence_length {config.model.sequence_length}"
    always = [
        ({"model.precision"}, config.model.precision),
        ({"model.sequence_length"}, sequence_length),
        ({f"model.{output}"}, f"{output} {getattr(config.model, output)}"),
    ]
    sizes = {BATCH, MICRO, COPIES}
    if not trains:
        return [*always, (sizes, f"micro-batch {e.micro_batch_size}")]
    rate, prefix = t.optimizer.learning_rate, "training.optimizer.learning_rate"
    batch = (
        f"batch {t.global_batch_size} = {e.micro_batch_size} micro × "
        f"{config.gradient_accumulation} accumulation × {e.data_parallel} dp{reason}"
    )
    warmup = f"warm-up of {rate.warmup_proportion or 0:g} of the steps"
    return [
        *always,
        (sizes, batch),
        *([({GROUPS}, f"experts in {e.expert_groups} groups")] if e.expert_groups > 1 else []),
        ({f"{prefix}.maximum"}, f"learning rate {rate.maximum:g}"),
        ({f"{prefix}.warmup_proportion"}, warmup),
        ({EPOCHS}, f"{t.epochs or 0:g} epochs"),
        ({"data.loss_on"}, f"loss on {getattr(config.data, 'loss_on', '')}"),
    ]
