"""What the program chooses where no preset says how to run a model: by the model, the data and the
machine. What is given is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any

import popdist
import popxl
from config.base import flattened, nested
from config.errors import ConfigError
from config.layers import (
    BATCH,
    COPIES,
    EPOCHS,
    GROUPS,
    LAYOUT,
    MICRO,
    PLAN,
    Layer,
    Settings,
    largest_divisor,
)
from config.process_checks import check_same_run_on_all_processes
from config.sections import RunConfig
from data.data_cache import DataCache
from data.length_stats import LengthStats, measure_lengths
from data.pipeline import Pipeline
from data.preference_samples import answers_per_example
from data.sample_format import SampleFormat, length_multiple
from data.seq2seq import SEQ2SEQ
from data.task import Split
from modelling.devices import device_desc
from modelling.model_family import get_family
from planning.expert_group_count import min_groups
from planning.fit_search import plan_best_training
from planning.hardware.machines import Machine, machine, machine_for_device_kind
from planning.hardware.memory_check import host_memory
from planning.hardware.resource_errors import explain_resource_errors
from planning.parallel_layouts import list_layouts
from planning.placement_search import may_fit, plans_placement, search_placement
from planning.program_variants import VariantCache
from popxl import hardware
from terminal.command_line import CommandLine
from terminal.screen import say

LONGEST = 2048
"""Tokens of a sample, unless a person asks for more."""

MAX_CONTEXT = 2**17
"""Tokens that a model reads and writes to answer, unless a person asks for more."""

WRITTEN = 256
"""Tokens of an answer, and of a usual prompt, where no data say how long they are."""

USUAL_BATCH, MIN_BATCH, STEPS_OF_EPOCH = 32, 8, 20
"""Samples of an optimizer step: fewer, where an epoch would have fewer steps than that."""

TOKENS_AT_ONCE = {"cpu": 2**12, "gpu": 2**14, "tpu": 2**14}
"""Tokens of a micro-batch that keep a device busy."""

RATES = {
    "seq2seq": ((1.5e8, 3e-4), (5e8, 1e-4), (1.5e9, 5e-5), (5e9, 1e-5), (float("inf"), 5e-6)),
    "causal_lm": ((1.5e8, 1e-4), (5e8, 5e-5), (1.5e9, 2e-5), (5e9, 1e-5), (float("inf"), 5e-6)),
}
"""Learning rates of full fine-tuning with AdamW, by shape and for models of fewer parameters than
that: those of the presets."""

ADAPTER_RATE = 2e-4
"""That of adapters, of any model."""

PREFERENCES = 0.05
"""The factor on it where preferences are learned: they lead far from the reference soon."""

WARMUP = 0.1

MIN_GAIN = 0.02
"""The fraction of the time for whose gain another micro-batch than the usual is chosen."""


@dataclass(frozen=True)
class Devices:
    """What a choice depends on of a machine.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        bfloat16: whether its devices multiply that at full rate.
        count: how many devices a run can have, those of all processes.
        memory: bytes for intermediate values, of a device, or of the host it shares.
        machine: to simulate runs on; None: devices share the host's memory.
    """

    platform: str
    bfloat16: bool
    count: int
    memory: float
    machine: Machine | None = None

    @classmethod
    def of(cls, machine: Machine) -> Devices:
        """The devices of one host of a machine."""
        accelerated = machine.platform != "cpu"
        count = (machine.devices or 1) if accelerated else 1
        on = machine if accelerated else None
        bfloat16 = accelerated and machine.flops["bfloat16"] >= machine.flops["float16"]
        return cls(machine.platform, bfloat16, count, machine.usable_bytes, on)

    @classmethod
    def here(cls, config: RunConfig) -> Devices:
        """The devices at hand.

        Raises:
            DeviceError: there is none of the kind.
        """
        desc, instances = device_desc(config), popdist.getNumInstances()
        platform = hardware.platform(desc)
        count = (1 if platform == "cpu" else hardware.device_count(desc)) * instances
        memory = popxl.plan.device_memory(desc, 1) or (host_memory() or 2**34) / 2
        least = min(popdist.all_gather_object(memory))  # all processes choose alike
        on = None
        if platform != "cpu":
            kind = hardware.device_kinds(desc, 1)[0]
            tabled = machine_for_device_kind(kind) or machine("h100")
            local = hardware.device_count(desc)
            if instances > 1:  # each may have some of a host's
                local = max(local, tabled.devices or 1)
            host = min(popdist.all_gather_object(host_memory() or tabled.host_memory))
            on = replace(tabled.with_usable_bytes(least), devices=local, host_memory=host)
        return cls(platform, hardware.has_bfloat16(desc), count, least, on)


@dataclass(frozen=True)
class AutoConfig:
    """Settings that are being completed.

    Attributes:
        devices: to run on.
        at_once: samples of a micro-batch that keep a device busy; None: as many as are given.
        simulated: samples a second by the size of the micro-batch, where runs were simulated.
    """

    settings: Settings
    devices: Devices
    at_once: int | None = None
    simulated: Mapping[int, float] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        """The configuration, as far as it is complete."""
        return self.settings.config

    @property
    def given(self) -> frozenset[str]:
        """Dotted names of the fields that are not to be chosen."""
        return self.settings.names

    def with_values(self, **fields: Any) -> AutoConfig:
        """With values of the fields that are open, by dotted name with `__` for the dots."""
        named = {name.replace("__", "."): value for name, value in fields.items()}
        return replace(self, settings=self.settings.choose(named))


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
    """The command line with a complete configuration. Says in a line what was chosen: of presets,
    how devices share training where they do not say it.

    Args:
        splits: the data that are read; none: what is asked is not known yet.
        trains: for training, of the first split.
        only_plans: there need not be any data.
        machine: to choose for; None: the one at hand.
        count: devices to use; None: all of the machine.
        data_cache: what the run shares; the data that are read stay there.
        programs: where those that are tried stay.

    Raises:
        UserError: nothing says which data, or they cannot be had; there is no device of the kind.
    """
    settings, shares = line.settings, trains and line.settings.shares_openly
    if not (settings.is_open or shares):
        return line
    check_same_run_on_all_processes(
        line.config, **{"the settings that are given": sorted(settings.names)}
    )
    answers = not splits and not trains
    if settings.is_open and not _has_data(settings.names, splits):
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
        devices = Devices.here(line.config) if machine is None else Devices.of(machine)
        made = AutoConfig(settings, devices if count is None else replace(devices, count=count))
        if settings.is_open:
            made = _chosen(made, splits, trains, data_cache or DataCache(), answers)
        if shares:
            made = _with_layout(made, line.preset, programs)
        if settings.is_open and trains:
            made = _with_micro_batch(made, programs)
    if told := _told(made, trains):
        say(told)
    return replace(line, config=made.config, settings=made.settings)


def _chosen(
    choices: AutoConfig, splits: Sequence[Split], trains: bool, data_cache: DataCache, answers: bool
) -> AutoConfig:
    config = choices.config
    shape = get_family(config).sample_format
    bits = "bfloat16" if choices.devices.bfloat16 else "float32"
    choices = choices.with_values(model__precision=bits)
    data = Pipeline(choices.config, shape, data_cache) if splits else None
    lengths = None if data is None else measure_lengths(data, splits)
    if answers:
        choices = _with_lengths_of_answers(choices, shape)
    else:
        choices = _with_lengths(choices, shape, lengths)
    if trains:
        is_plain = data is not None and data.task.row_format == "language_modeling"
        choices = choices.with_values(**_habits(choices.config, shape, is_plain))
    choices = _with_batch(choices, shape, lengths if trains else None, lengths is not None)
    if not trains:
        return choices
    groups = min_groups(choices.config, choices.devices.memory)
    return choices.with_values(execution__expert_groups=groups)


def _has_data(given: frozenset[str], splits: Sequence[Split]) -> bool:
    """Whether the data of splits are named, or none are asked for."""
    return not splits or bool(
        {"data.dataset", "data.train", *(f"data.{split}" for split in splits)} & given
    )


def _with_lengths(
    choices: AutoConfig, shape: SampleFormat, lengths: LengthStats | None
) -> AutoConfig:
    """As long as the longest texts, up to `LONGEST` and what the model was made for."""
    config = choices.config
    most = min(LONGEST, _context(config)) * (
        answers_per_example(config) if shape.trains_whole_chats else 1
    )
    multiple = length_multiple(config)

    def fitting(tokens: int) -> int:
        return max(min(ceil(tokens / multiple) * multiple, most // multiple * multiple), multiple)

    written = fitting(min(WRITTEN, most // 2) if lengths is None else lengths.target)
    read = fitting((most - written) if lengths is None else lengths.longest)
    fields = {"model__sequence_length": read, f"model__{shape.output_field}": written}
    return choices.with_values(**fields)


def _with_lengths_of_answers(choices: AutoConfig, shape: SampleFormat) -> AutoConfig:
    """Prompts may be as long as the model reads besides what it writes."""
    usual = min(WRITTEN, _context(choices.config) // 2)
    choices = choices.with_values(**{f"model__{shape.output_field}": usual})
    config = choices.config
    written = config.generation.max_tokens or shape.output_length(config)
    read = _read_besides(config, _context(config), written)
    return choices.with_values(model__sequence_length=read)


def _read_besides(config: RunConfig, most: int, written: int) -> int:
    """Tokens of the longest prompt where so many are written after it, of at most `most`."""
    multiple = length_multiple(config)
    return max((most - written) // multiple, 1) * multiple


def with_generation_lengths(line: CommandLine) -> CommandLine:
    """The command line for writing with a saved run, whose lengths follow from its data: a prompt
    may be as long as the model reads, and an answer to data of one's own is not cut sooner."""
    config, (run, *over) = line.config, line.settings.layers
    flags = [flattened(layer.values) for layer in over]
    of_run = run.is_whole and any(f.get("checkpoint.load") == run.name for f in flags)
    given, shape = set[str]().union(*flags), get_family(config).sample_format
    shares = shape is SEQ2SEQ and "data.examples_per_sample" in given  # prompts share samples
    if not of_run or line.preset != run.name or shares:
        return line
    most = max(_context(config), config.model.sequence_length)
    written = shape.max_new_tokens(config)
    if config.data.train is not None and config.generation.max_tokens is None:
        written = min(max(written, WRITTEN), most // 2)
    read = _read_besides(config, most, written)
    if shape is SEQ2SEQ:  # what is written takes no place from it
        read = max(read, config.model.sequence_length)
    fields = {"model.sequence_length": read, "generation.max_tokens": written}
    if shape is SEQ2SEQ:
        fields["data.examples_per_sample"] = 1
    new = {name: value for name, value in fields.items() if name not in given}
    return replace(line, config=config.changed(new))


def _context(config: RunConfig) -> int:
    """Tokens that the model was made for, up to `MAX_CONTEXT`; `LONGEST` if it knows no limit."""
    return min(MAX_CONTEXT, config.model.max_position_embeddings or LONGEST)


def _habits(config: RunConfig, shape: SampleFormat, is_plain: bool) -> dict[str, Any]:
    """What suits fine-tuning by the habit of the field, beyond the defaults of the fields.

    Args:
        is_plain: the data are documents, which are learned whole.
    """
    size = config.min_weights()
    of_shape = next(rate for most, rate in RATES[shape.name] if size < most)
    rate = ADAPTER_RATE if config.adapter.rank else of_shape
    rate *= PREFERENCES if config.training.preference_type else 1
    learned = {} if shape is SEQ2SEQ else {"data__loss_on": "all" if is_plain else "completion"}
    prefix = "training__optimizer__learning_rate"
    return {f"{prefix}__maximum": rate, f"{prefix}__warmup_proportion": WARMUP, **learned}


def _with_batch(
    choices: AutoConfig, shape: SampleFormat, lengths: LengthStats | None, measured: bool
) -> AutoConfig:
    """The batch of a step, and how devices and micro-batches share it.

    Args:
        lengths: of the data that are trained on; None: nothing is trained.
        measured: whether the sequence length is that of data.
    """
    e, given = choices.config.execution, choices.given
    whole = None
    if "training.global_batch_size" in given:
        whole = choices.config.training.global_batch_size
    copies = e.data_parallel
    if "execution.data_parallel" not in given:
        copies = _copies(choices, whole)
    each = (whole or _batch(choices.config, lengths)) // copies or 1
    if "execution.micro_batch_size" in given:
        micro = e.micro_batch_size
        each = max(each // micro, 1) * micro
    else:
        most = _most_at_once(choices, shape, measured)
        choices = replace(choices, at_once=most)
        each = each if whole else 1 << each.bit_length() - 1
        micro = largest_divisor(each, most)
    return choices.with_values(
        training__global_batch_size=each * copies,
        execution__micro_batch_size=micro,
        execution__data_parallel=copies,
    )


def _with_layout(choices: AutoConfig, name: str, programs: VariantCache) -> AutoConfig:
    """The layout of the devices in which a simulated step is fastest, with micro-batches that fit;
    says which. Without simulated steps, copies of the model share the batch, as far as it goes.

    Args:
        name: of the configuration, for people.
    """
    config, devices, on = choices.config, choices.devices, choices.devices.machine
    if devices.count == 1:
        return choices
    micro = choices.at_once or config.execution.micro_batch_size
    ways = list_layouts(config, devices.count, None if choices.settings.by_flag(MICRO) else micro)
    best = (
        ways[0] if on is None else plan_best_training(name, ways, on, programs).requirements.config
    )
    e = best.execution
    sizes = e.data_parallel, e.tensor_parallel, e.micro_batch_size, e.expert_groups
    values = dict(zip((*LAYOUT, MICRO, GROUPS), sizes, strict=True))
    settings = choices.settings.choose(values)
    by_plan = {n: v for n, v in values.items() if n in LAYOUT or not settings.is_open}
    settings = settings.over(Layer(PLAN, nested(by_plan)))
    few = "" if best.replicas == devices.count else f" of {devices.count}, which cannot share it"
    say(
        f"devices: {best.replicas} = {e.data_parallel} dp × {e.tensor_parallel} tp{few}, "
        f"micro-batches of {e.micro_batch_size} (--data_parallel and --tensor_parallel change it)"
    )
    return replace(choices, settings=settings)


def _with_micro_batch(choices: AutoConfig, programs: VariantCache) -> AutoConfig:
    """Another size of the micro-batch where simulated runs are faster with it, by at least
    `MIN_GAIN`: what is larger reads weights less often, and takes memory that could hold state.
    Larger ones are tried as long as they are faster, and a smaller one where none is.
    """
    config, on = choices.config, choices.devices.machine
    if "execution.micro_batch_size" in choices.given or on is None or not plans_placement(config):
        return choices
    usual, half = config.execution.micro_batch_size, config.execution.micro_batch_size // 2
    each = config.gradient_accumulation * usual

    def seconds(n: int) -> float:
        there = choices.with_values(execution__micro_batch_size=n).config
        return _simulated(there, on, programs)

    runs = {usual: seconds(usual)}
    for n in (2 * usual, 4 * usual):
        if each % n or runs[n // 2] == inf:  # what is larger does not fit either
            break
        runs[n] = seconds(n)
        if runs[n] >= runs[n // 2]:
            break
    if half and each % half == 0 and runs.get(2 * usual, inf) >= runs[usual]:
        runs[half] = seconds(half)
    best = min(runs, key=runs.__getitem__)
    if runs[best] > (1 - MIN_GAIN) * runs[usual]:
        best = usual
    samples = config.training.global_batch_size * config.execution.device_iterations
    rates = {n: samples / taken for n, taken in runs.items() if taken < inf}
    return replace(choices.with_values(execution__micro_batch_size=best), simulated=rates)


def _simulated(config: RunConfig, on: Machine, programs: VariantCache) -> float:
    """Seconds of a simulated run of training; infinite where it does not fit."""
    every = config.gradient_accumulation
    execution = replace(config.execution, activations="recompute", micro_batches_per_pass=every)
    again = replace(config, execution=execution)
    candidates = programs.variants(config, on.target)
    if not may_fit(candidates, config, on):
        return inf
    best = search_placement(candidates, again, on).best
    return best.seconds if best.fits else inf


def _batch(config: RunConfig, lengths: LengthStats | None) -> int:
    if lengths is None:
        return USUAL_BATCH
    per_sample = getattr(config.data, "examples_per_sample", 1)
    packed = lengths.examples * lengths.mean / config.model.sequence_length
    samples = max(packed, lengths.examples / per_sample)
    size = USUAL_BATCH
    while size > MIN_BATCH and samples / size < STEPS_OF_EPOCH:
        size //= 2
    return size


def _copies(choices: AutoConfig, batch: int | None) -> int:
    """Data-parallel copies: all devices there are, as far as the batch can be shared."""
    most = max(choices.devices.count // choices.config.execution.tensor_parallel, 1)
    if batch is None:
        return most
    return largest_divisor(batch, most)


def _most_at_once(choices: AutoConfig, shape: SampleFormat, measured: bool) -> int:
    """Samples of a micro-batch: enough to keep a device busy, in a quarter of its memory."""
    config, length = choices.config, choices.config.model.sequence_length
    if not measured:
        config = config.changed({"model.sequence_length": min(length, LONGEST - WRITTEN)})
    usual = length if measured else min(length, WRITTEN)
    tokens = TOKENS_AT_ONCE[choices.devices.platform] // usual
    return int(max(min(tokens, choices.devices.memory / 4 / _bytes_of_sample(config, shape)), 1))


def _bytes_of_sample(config: RunConfig, shape: SampleFormat) -> float:
    """About what a layer's backward pass, or the loss, takes for a sample, in float32."""
    m = config.model
    layer = m.sequence_length * m.hidden_size * 40
    heads = config.tensor_parallel_sizes().get(m.path("num_attention_heads"), 1)
    scores = 3 * heads * m.sequence_length**2 // config.execution.attention_slices
    logits = 3 * shape.num_predictions(config) * m.vocab_size
    return 4.0 * max(layer + scores, logits) / config.execution.tensor_parallel


def _why(made: AutoConfig) -> str:
    """Samples a second of the sizes that were simulated."""
    if not made.simulated:
        return ""
    of = ", ".join(f"{rate:,.1f} with {n}" for n, rate in sorted(made.simulated.items()))
    return f" (simulated samples/s: {of})"


def _told(made: AutoConfig, trains: bool) -> str | None:
    """What was chosen, in a line; None if all was given."""
    c, chosen = made.config, made.settings.choices
    pieces = [text for fields, text in _pieces(c, trains, _why(made)) if fields & chosen.keys()]
    return f"chosen: {', '.join(pieces)} (flags change it)" if pieces else None


def _pieces(c: RunConfig, trains: bool, why: str) -> list[tuple[set[str], str]]:
    """What may be chosen, as fields and in words."""
    e, t, output = c.execution, c.training, get_family(c).sample_format.output_field
    read = f"sequence_length {c.model.sequence_length}"
    always = [
        ({"model.precision"}, c.model.precision),
        ({"model.sequence_length"}, read),
        ({f"model.{output}"}, f"{output} {getattr(c.model, output)}"),
    ]
    sizes = {BATCH, MICRO, COPIES}
    if not trains:
        return [*always, (sizes, f"micro-batch {e.micro_batch_size}")]
    rate, prefix = t.optimizer.learning_rate, "training.optimizer.learning_rate"
    batch = (
        f"batch {t.global_batch_size} = {e.micro_batch_size} micro × {c.gradient_accumulation} "
        f"accumulation × {e.data_parallel} dp{why}"
    )
    warmup = f"warm-up of {rate.warmup_proportion or 0:g} of the steps"
    return [
        *always,
        (sizes, batch),
        *([({GROUPS}, f"experts in {e.expert_groups} groups")] if e.expert_groups > 1 else []),
        ({f"{prefix}.maximum"}, f"learning rate {rate.maximum:g}"),
        ({f"{prefix}.warmup_proportion"}, warmup),
        ({EPOCHS}, f"{t.epochs or 0:g} epochs"),
        ({"data.loss_on"}, f"loss on {getattr(c.data, 'loss_on', '')}"),
    ]
