"""Settings in layers: what lies above wins, and each value knows who gives it.

Of a run that begins, from below: the defaults of the fields, what the program chooses, a preset or
a person's YAML, flags. Of one that is continued: the defaults, the run's config.yml, flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

from config.base import flattened, leaves, nested
from config.errors import ContradictionError
from config.own_yaml import is_own
from config.presets import merge
from config.sections import RunConfig
from files.formatting import format_name

BATCH, MICRO = "training.global_batch_size", "execution.micro_batch_size"
COPIES, EPOCHS = "execution.data_parallel", "training.epochs"
GROUPS = "execution.expert_groups"
LAYOUT = COPIES, "execution.tensor_parallel"
"""What says how many devices there are: where nobody gives either, all devices of a machine."""
DROPOUTS = (
    *(f"model.{name}" for name in ("dropout_prob", "attention_dropout", "activation_dropout")),
    "adapter.dropout",
)
CROSS_ENTROPY = "cross_entropy"
PLAN = "the plan"
"""The layer of what it says of devices."""

LARGEST_MICRO = 2**20
"""Above it, no micro-batch is looked for that divides a batch."""


@dataclass(frozen=True)
class Layer:
    """Values that come from one place.

    Attributes:
        name: of the place, for people.
        values: nested plain data.
        is_whole: they say all that there is to say: what they leave out has its default.
    """

    name: str
    values: Mapping[str, Any]
    is_whole: bool = False


@dataclass(frozen=True)
class Settings:
    """A configuration, and where its values come from.

    Attributes:
        layers: those that are given, from below.
        chosen: what the program has chosen, nested.
    """

    section: type[RunConfig]
    layers: tuple[Layer, ...]
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether the program chooses what nobody gives, in place of the defaults."""
        return not any(layer.is_whole for layer in self.layers)

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """All that is given, nested."""
        values: list[Mapping[str, Any]] = [layer.values for layer in self.layers]
        return reduce(merge, values, {})

    @cached_property
    def names(self) -> frozenset[str]:
        """Dotted names of the fields that are given."""
        return frozenset(flattened(self.given))

    @cached_property
    def config(self) -> RunConfig:
        """The configuration.

        Raises:
            ConfigError: it is none.
        """
        return self.section.from_dict(merge(self.chosen, self.given))

    def over(self, *layers: Layer) -> Settings:
        """With layers on top."""
        return replace(self, layers=(*self.layers, *layers))

    def choose(self, values: Mapping[str, Any]) -> Settings:
        """With choices of the program, by dotted names: those that nobody gives count."""
        new = {name: value for name, value in values.items() if name not in self.names}
        return replace(self, chosen=merge(self.chosen, nested(new)))

    @property
    def shares_openly(self) -> bool:
        """Whether nobody says how devices share training, or how many there are."""
        return not self.names & set(LAYOUT)

    @property
    def is_layout_told(self) -> bool:
        """Whether somebody does say it, and not the plan."""
        return not self.shares_openly and all(layer.name != PLAN for layer in self.layers)

    @property
    def choices(self) -> Mapping[str, Any]:
        """What was chosen and counts, by dotted names."""
        in_use, chosen = flattened(merge(self.chosen, self.given)), flattened(self.chosen)
        return {n: v for n, v in chosen.items() if n not in self.names and in_use[n] == v}

    def by_flag(self, name: str) -> bool:
        """Whether a flag gives a field."""
        flags = (layer.values for layer in self.layers if layer.name == "flags")
        return any(name in flattened(values) for values in flags)

    def level(self, name: str) -> int:
        """The number of the uppermost layer that gives a field; -1: none does."""
        levels = (i for i, layer in enumerate(self.layers) if name in flattened(layer.values))
        return max(levels, default=-1)


def names_all(section: type[RunConfig], values: Mapping[str, Any]) -> bool:
    """Whether values give every field, as the config.yml of a run does."""
    return flattened(values).keys() >= {leaf.dotted for leaf in leaves(section)}


def with_one_length(settings: Settings) -> tuple[Settings, list[str]]:
    """Where a layer gives steps and epochs, the steps decide, as in transformers. Of a run, which
    writes both, the epochs are the cause.

    Returns:
        The settings, and lines for people.
    """
    layers, lines = [], []
    for layer in settings.layers:
        training = layer.values.get("training")
        both = isinstance(training, Mapping) and (training.get("steps"), training.get("epochs"))
        if both and None not in both and not layer.is_whole:
            steps, epochs = map(format_name, both)
            lines.append(f"{layer.name}: training.steps {steps} decides, not epochs {epochs}")
            one = merge(layer.values, {"training": {"epochs": None}})
            layer = replace(layer, values=one)
        layers.append(layer)
    return replace(settings, layers=tuple(layers)), lines


def with_length_and_batch(settings: Settings) -> Settings:
    """With three epochs, as transformers trains, where nobody says how long; and with a batch that
    micro-batches fill, where it is chosen later."""
    settings = settings.choose({EPOCHS: 3.0})
    if settings.is_open:
        values = flattened(settings.given)
        sizes = [values.get(name, 1) for name in (MICRO, COPIES)]
        if all(type(n) is int for n in sizes):
            settings = settings.choose({BATCH: math.prod(sizes)})
    return settings


def with_fitting_micro_batch(settings: Settings) -> tuple[Settings, list[str]]:
    """A micro-batch from a lower layer follows a batch, or a number of copies, from a higher one.

    Returns:
        The settings, and a line for people if it changed.
    """
    values = flattened(settings.given)
    sizes = [values.get(name, 1) for name in (BATCH, MICRO, COPIES)]
    above = max(settings.level(BATCH), settings.level(COPIES)) > settings.level(MICRO) >= 0
    if not above or not all(type(n) is int and n > 0 for n in sizes):
        return settings, []
    batch, micro, copies = sizes
    if batch % copies or batch % (micro * copies) == 0 or micro > LARGEST_MICRO:
        return settings, []
    fitting = largest_divisor(batch // copies, micro)
    text = f"{MICRO}: {micro} -> {fitting}, which divides the batch of {batch}"
    return settings.over(Layer("the batch", nested({MICRO: fitting}))), [text]


def without_contradictions(settings: Settings) -> tuple[Settings, list[str]]:
    """Settings of lower layers give way to those of higher ones which exclude them.

    Returns:
        The settings, and a line for people for each field that changed.

    Raises:
        ConfigError: there is no configuration; settings of the same layer exclude each other.
    """
    lines: list[str] = []
    while True:
        try:
            _ = settings.config
            return settings, lines
        except ContradictionError as error:
            settings, more = _give_way(settings, error)
            if not more:
                raise
            lines += more


def _give_way(settings: Settings, error: ContradictionError) -> tuple[Settings, list[str]]:
    """Change the fields that a higher layer excludes; no lines: there are none."""
    winner = max(error.fields, key=settings.level)
    top = settings.level(winner)
    changed = {n: v for n, v in error.remedies.items() if settings.level(n) < top}
    before = flattened(settings.given)
    reason = f"which {winner} {format_name(before.get(winner))} excludes"
    lines = [
        f"{name}: {format_name(before.get(name, 'its default'))} -> {format_name(value)}, {reason}"
        for name, value in changed.items()
    ]
    layer = Layer(f"{winner} of {settings.layers[top].name}", nested(changed))
    layers = (*settings.layers[:top], layer, *settings.layers[top:])
    return (replace(settings, layers=layers) if changed else settings), lines


def without_dropout(settings: Settings) -> tuple[Settings, list[str]]:
    """Preferences are learned without dropout, as in TRL, unless a person asks for it. Their
    reference has none.

    Returns:
        The settings, and a line for people for each field with dropout.
    """
    config, lines, off = settings.config, list[str](), dict[str, float]()
    values = flattened(config.to_dict())
    trains = config.training.preference_type is not None and not config.model.eval
    for name in DROPOUTS if trains else ():
        value = values.get(name)
        if not value:
            continue
        if _asks_for_dropout(settings.layers[settings.level(name)]):
            lines.append(
                f"warning: {name} is {value:g}: answers are compared under dropout, which "
                "preferences usually do without"
            )
        else:
            off[name] = 0.0
            lines.append(
                f"{name}: {value:g} -> 0: preferences are learned without dropout (--{name} "
                f"{value:g} keeps it)"
            )
    return settings.over(*([Layer("preferences", nested(off))] if off else [])), lines


def _asks_for_dropout(layer: Layer) -> bool:
    """Whether a layer is a person's, or gives preferences with their dropout: not that of a model,
    a preset, an adapter, or a run of another objective."""
    by_person = layer.name == "flags" or (is_own(layer.name) and not layer.is_whole)
    objective = flattened(layer.values).get("training.objective", CROSS_ENTROPY)
    return by_person or objective != CROSS_ENTROPY


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)
