"""Layered configuration: sources of values in order of priority, such as presets and flags.

Sources of a new run, lowest priority first: defaults of the fields, values that the program
chooses, a preset or the user's YAML, flags. Of a resumed run: defaults, its config.yml, flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

from config.base import config_fields, flatten_by_path, nest_by_path
from config.errors import ContradictionError
from config.objectives import OBJECTIVES
from config.presets import is_user_file, merge_over
from config.sections import RunConfig
from files.formatting import format_name

BATCH, MICRO = "training.global_batch_size", "execution.micro_batch_size"
COPIES, EPOCHS = "execution.data_parallel", "training.epochs"
GROUPS = "execution.expert_groups"
LAYOUT = COPIES, "execution.tensor_parallel"
"""Fields of the parallel layout. If neither is set, all devices of the machine are used."""

AUTO_FIELDS = (
    "model.precision",
    "model.sequence_length",
    "model.output_length",
    "model.decoder_sequence_length",
    BATCH,
    "training.optimizer.learning_rate.maximum",
    "training.optimizer.learning_rate.warmup_proportion",
    MICRO,
    *LAYOUT,
    "data.loss_on",
)
"""Fields that `planning.auto_config` can choose if no preset sets them."""

DROPOUTS = (
    *(f"model.{name}" for name in ("dropout_prob", "attention_dropout", "activation_dropout")),
    "adapter.dropout",
)
CROSS_ENTROPY = "cross_entropy"
PLAN = "the plan"
"""Name of the source of the layout that the plan chooses."""

LARGEST_MICRO = 2**20
"""Largest micro-batch for which a divisor of the batch is searched."""


@dataclass(frozen=True)
class ConfigSource:
    """Field values from one source, such as a preset, a file or the flags.

    Attributes:
        name: name of the source in messages.
        values: nested plain data.
        is_exhaustive: True if fields that the source leaves out have their defaults.
    """

    name: str
    values: Mapping[str, Any]
    is_exhaustive: bool = False


@dataclass(frozen=True)
class LayeredConfig:
    """Configuration merged from several sources; later sources take precedence.

    Attributes:
        sources: sources in order of priority, the lowest first.
        auto_values: values that the program has chosen, nested.
    """

    section: type[RunConfig]
    sources: tuple[ConfigSource, ...]
    auto_values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_auto_fields(self) -> bool:
        """True if the program chooses the config fields that no source sets."""
        return not any(source.is_exhaustive for source in self.sources)

    @cached_property
    def explicit_values(self) -> Mapping[str, Any]:
        """Field values merged from all sources, without defaults, nested by config section."""
        values: list[Mapping[str, Any]] = [source.values for source in self.sources]
        return reduce(merge_over, values, {})

    @cached_property
    def explicit_names(self) -> frozenset[str]:
        """Dotted names of the config fields that at least one source sets."""
        return frozenset(flatten_by_path(self.explicit_values))

    @cached_property
    def config(self) -> RunConfig:
        """The merged and validated configuration.

        Raises:
            ConfigError: the values are not a valid configuration.
        """
        return self.section.from_dict(merge_over(self.auto_values, self.explicit_values))

    def with_sources(self, *sources: ConfigSource) -> LayeredConfig:
        """Returns a copy with further sources of field values, of the highest priority."""
        return replace(self, sources=(*self.sources, *sources))

    def with_auto_values(self, values: Mapping[str, Any]) -> LayeredConfig:
        """Returns a copy with program-chosen values for config fields that no source sets.

        `values` are chosen by the program, by dotted name.
        """
        new = {name: value for name, value in values.items() if name not in self.explicit_names}
        return replace(self, auto_values=merge_over(self.auto_values, nest_by_path(new)))

    @property
    def planner_chooses_layout(self) -> bool:
        """True if the planner chooses data and tensor parallelism, because no source sets them."""
        return not self.explicit_names & set(LAYOUT)

    def needs_auto_values(self, trains: bool) -> bool:
        """Returns whether `planning.auto_config` has a field to choose, for training or not."""
        return self.has_auto_fields or (trains and self.planner_chooses_layout)

    @property
    def has_explicit_layout(self) -> bool:
        """True if a preset, file or flag, not the planner, sets data and tensor parallelism."""
        return not self.planner_chooses_layout and all(
            source.name != PLAN for source in self.sources
        )

    @property
    def auto_values_in_use(self) -> Mapping[str, Any]:
        """Program-chosen values, by dotted name, of the config fields that no source sets."""
        in_use = flatten_by_path(merge_over(self.auto_values, self.explicit_values))
        return {
            name: value
            for name, value in flatten_by_path(self.auto_values).items()
            if name not in self.explicit_names and in_use[name] == value
        }

    def is_set_by_flag(self, name: str) -> bool:
        """Returns whether a flag sets the field with this dotted name."""
        flags = (source.values for source in self.sources if source.name == "flags")
        return any(name in flatten_by_path(values) for values in flags)

    def priority_of_field(self, field_path: str) -> int:
        """Returns the index of the last source that sets a config field; -1 if none does."""
        indices = (
            i
            for i, source in enumerate(self.sources)
            if field_path in flatten_by_path(source.values)
        )
        return max(indices, default=-1)


def sets_every_field(section: type[RunConfig], values: Mapping[str, Any]) -> bool:
    """Returns whether nested values set every field of a config section, as config.yml does."""
    return flatten_by_path(values).keys() >= {leaf.path for leaf in config_fields(section)}


def drop_overridden_epochs(settings: LayeredConfig) -> tuple[LayeredConfig, list[str]]:
    """Drop the number of epochs from sources that also set steps, which take precedence.

    The config.yml of a run has both, and there the steps follow from the epochs.

    Returns:
        The settings, and messages for the user.
    """
    sources, messages = [], []
    for source in settings.sources:
        training = source.values.get("training")
        both = isinstance(training, Mapping) and (training.get("steps"), training.get("epochs"))
        if both and None not in both and not source.is_exhaustive:
            steps, epochs = map(format_name, both)
            messages.append(f"{source.name}: training.steps {steps} decides, not epochs {epochs}")
            values = merge_over(source.values, {"training": {"epochs": None}})
            source = replace(source, values=values)
        sources.append(source)
    return replace(settings, sources=tuple(sources)), messages


def with_default_epochs_and_batch(settings: LayeredConfig) -> LayeredConfig:
    """Set the defaults of three epochs, one of rollouts, and of a batch of whole micro-batches."""
    values = flatten_by_path(settings.explicit_values)
    spec = OBJECTIVES.get(str(values.get("training.objective")))
    has_rollouts = spec is not None and spec.row_type == "rollout"
    settings = settings.with_auto_values({EPOCHS: 1.0 if has_rollouts else 3.0})
    if settings.has_auto_fields:
        sizes = [values.get(name, 1) for name in (MICRO, COPIES)]
        if all(type(n) is int for n in sizes):
            settings = settings.with_auto_values({BATCH: math.prod(sizes)})
    return settings


def fit_micro_batch_to_batch(settings: LayeredConfig) -> tuple[LayeredConfig, list[str]]:
    """Lower the micro-batch size to a divisor of a higher-priority source's batch size.

    Returns:
        The settings, and a message for the user if it changed.
    """
    values = flatten_by_path(settings.explicit_values)
    sizes = [values.get(name, 1) for name in (BATCH, MICRO, COPIES)]
    above = (
        max(settings.priority_of_field(BATCH), settings.priority_of_field(COPIES))
        > settings.priority_of_field(MICRO)
        >= 0
    )
    if not above or not all(type(n) is int and n > 0 for n in sizes):
        return settings, []
    batch, micro, copies = sizes
    if batch % copies or batch % (micro * copies) == 0 or micro > LARGEST_MICRO:
        return settings, []
    fitting = largest_divisor(batch // copies, micro)
    text = f"{MICRO}: {micro} -> {fitting}, which divides the batch of {batch}"
    return settings.with_sources(ConfigSource("the batch", nest_by_path({MICRO: fitting}))), [text]


def resolve_contradictions(settings: LayeredConfig) -> tuple[LayeredConfig, list[str]]:
    """Override field values of lower-priority sources that contradict higher-priority ones.

    Returns:
        The settings, and a message for the user for each field that changed.

    Raises:
        ConfigError: the configuration is invalid; values of one source exclude each other.
    """
    messages: list[str] = []
    while True:
        try:
            _ = settings.config
            return settings, messages
        except ContradictionError as error:
            settings, more = _override_lower_sources(settings, error)
            if not more:
                raise
            messages += more


def _override_lower_sources(
    settings: LayeredConfig, error: ContradictionError
) -> tuple[LayeredConfig, list[str]]:
    """Override fields that contradict a field of a higher-priority source; returns messages."""
    winner = max(error.fields, key=settings.priority_of_field)
    top = settings.priority_of_field(winner)
    changed = {n: v for n, v in error.remedies.items() if settings.priority_of_field(n) < top}
    before = flatten_by_path(settings.explicit_values)
    reason = f"which {winner} {format_name(before.get(winner))} excludes"
    messages = [
        f"{name}: {format_name(before.get(name, 'its default'))} -> {format_name(value)}, {reason}"
        for name, value in changed.items()
    ]
    source = ConfigSource(f"{winner} of {settings.sources[top].name}", nest_by_path(changed))
    sources = (*settings.sources[:top], source, *settings.sources[top:])
    return (replace(settings, sources=sources) if changed else settings), messages


def disable_preference_dropout(settings: LayeredConfig) -> tuple[LayeredConfig, list[str]]:
    """Disable dropout for preference objectives, as TRL does, unless the user sets it.

    Their reference log-probabilities are computed without dropout.

    Returns:
        The settings, and a message for the user for each field with dropout.
    """
    config, messages, off = settings.config, list[str](), dict[str, float]()
    values = flatten_by_path(config.to_dict())
    has_rollouts = config.training.row_type == "rollout"
    what = "rollouts" if has_rollouts else "preferences"
    compares = config.training.learns_preferences or config.training.has_row_pairs or has_rollouts
    trains = compares and not config.model.eval
    for name in DROPOUTS if trains else ():
        value = values.get(name)
        if not value:
            continue
        if _sets_preference_dropout(settings.sources[settings.priority_of_field(name)]):
            messages.append(
                f"warning: {name} is {value:g}: answers are compared under dropout, which "
                f"{what} usually do without"
            )
        else:
            off[name] = 0.0
            messages.append(
                f"{name}: {value:g} -> 0: {what} are learned without dropout (--{name} "
                f"{value:g} keeps it)"
            )
    sources = [ConfigSource("preferences", nest_by_path(off))] if off else []
    return settings.with_sources(*sources), messages


def _sets_preference_dropout(source: ConfigSource) -> bool:
    """Returns whether a config source sets dropout for a preference objective on purpose.

    False for a model, a preset, an adapter, and a run of another objective.
    """
    is_users = source.name == "flags" or (is_user_file(source.name) and not source.is_exhaustive)
    objective = flatten_by_path(source.values).get("training.objective", CROSS_ENTROPY)
    return is_users or objective != CROSS_ENTROPY


def largest_divisor(number: int, limit: int) -> int:
    """Returns the largest divisor of a number that is at most `limit`."""
    return next(n for n in range(min(number, limit), 0, -1) if number % n == 0)
