"""Low-rank adapters (Hu et al., arXiv:2106.09685), with the settings of PEFT's LoRA."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import regex

from config.base import ConfigSection
from config.errors import ConfigError
from config.values import Names, NonNegativeInt, PathText, PositiveFloat, Probability, split_names
from files.formatting import format_value

ALL_LINEAR = "all-linear"
HEAD = "lm_head"
"""The module that `ALL_LINEAR` leaves out."""

NEW = "new"
"""In place of the numbers of tokens: those that are new."""

Pattern = Literal["rank_pattern", "alpha_pattern"]
PATTERNS: tuple[Pattern, ...] = ("rank_pattern", "alpha_pattern")
"""Fields with numbers by expressions for the ends of names."""

_NAMES = re.compile(r"[\w.-]+( *, *[\w.-]+)*")


@dataclass(frozen=True)
class Adapter(ConfigSection):
    """LoRA settings: trainable matrices A and B beside a frozen linear layer, W x + s B A x."""

    rank: NonNegativeInt = 0
    """Rank of LoRA adapters. 0: none. PEFT: r."""

    alpha: PositiveFloat = 8.0
    """The adapter's output is scaled by alpha / rank. PEFT: lora_alpha."""

    dropout: Probability = 0.0
    """Dropout probability on the input of A. PEFT: lora_dropout."""

    rslora: bool = False
    """Scale by alpha / √rank instead (arXiv:2312.03732). PEFT: use_rslora."""

    dora: bool = False
    """Scale the rows of W + s B A to learned norms (arXiv:2402.09353). PEFT: use_dora."""

    targets: Names | None = None
    """Layers with adapters: suffixes of Hugging Face's names, separated by commas; all-linear (not
    the head); or a regular expression for full names. null: queries and values, or none if
    target_parameters is given. PEFT: target_modules."""

    target_parameters: Names | None = None
    """Stacked experts with adapters, such as mlp.experts.gate_up_proj,mlp.experts.down_proj. PEFT:
    target_parameters."""

    rank_pattern: str | None = None
    """Other ranks by name suffix, such as k_proj=4,o_proj=16. PEFT: rank_pattern."""

    alpha_pattern: str | None = None
    """Other alphas, likewise. PEFT: alpha_pattern."""

    modules_to_save: Names | None = None
    """Modules to train in full: name suffixes, separated by commas. PEFT: modules_to_save."""

    trainable_tokens: str | None = None
    """Token ids whose embedding and head rows are trained, such as 32000-32003,32010; new: those of
    new_rows. PEFT: trainable_token_indices."""

    trainable_tokens_head: bool = True
    """Train these rows of an untied head too."""

    load: PathText | None = None
    """Adapter folder in PEFT's format to start from; it sets all of the above."""

    def validate(self) -> None:
        try:
            regex.compile(self.targets or "")
        except regex.error as error:
            raise ConfigError(
                f"adapter.targets is {format_value(self.targets)}, which is no regular expression "
                f"({error}): give names such as q_proj,v_proj, or {ALL_LINEAR}"
            ) from error
        self.parse_pattern("alpha_pattern")
        if any(rank % 1 for rank in self.parse_pattern("rank_pattern").values()):
            raise ConfigError(
                f"adapter.rank_pattern is {format_value(self.rank_pattern)}, but ranks are integers"
            )

    def is_target(self, module: str, default: str) -> bool:
        """Returns whether a linear layer, given by name, is a target of `adapter.targets`.

        Args:
            module: Hugging Face's name of it.
            default: the family's targets.
        """
        from config.regex_match import full_match

        targets = self.targets or default
        if targets == ALL_LINEAR:
            return module != HEAD
        if is_name_list(targets):
            return any(ends_with_name(module, name) for name in split_names(targets))
        return full_match(targets, module)

    def is_adapted(self, module: str, default: str) -> bool:
        """Returns whether a linear layer has LoRA matrices: a target that is not fully trained."""
        return not self.is_fully_trained(module) and self.is_target(module, default)

    def is_fully_trained(self, module: str) -> bool:
        """Returns whether a module belongs to `modules_to_save`, and so is trained in full."""
        return any(is_inside_module(module, name) for name in split_names(self.modules_to_save))

    def lora_rank(self, *names: str) -> int:
        """Returns the LoRA rank of a module, given by its Hugging Face and program names."""
        return int(first_matching_number(self.parse_pattern("rank_pattern"), names, self.rank))

    def lora_alpha(self, *names: str) -> float:
        """Returns the LoRA alpha of a module, given by its names."""
        return first_matching_number(self.parse_pattern("alpha_pattern"), names, self.alpha)

    def lora_scale(self, *names: str) -> float:
        """Returns the factor s of a module's LoRA update s B A x."""
        rank = self.lora_rank(*names)
        return self.lora_alpha(*names) / (rank**0.5 if self.rslora else rank)

    def parse_pattern(self, field: Pattern) -> dict[str, float]:
        """Returns the LoRA ranks or alphas by module pattern, parsed from a setting's text.

        Keys are regular expressions for the end of a module name.
        """
        text: str | None = getattr(self, field)
        pairs = [pair.rpartition("=") for pair in split_names(text)]
        try:
            found = {key.strip(): float(value) for key, _, value in pairs}
            if all(found) and all(regex.compile(k) and 0 < v < math.inf for k, v in found.items()):
                return found
        except (ValueError, regex.error):
            pass
        raise ConfigError(
            f"adapter.{field} is {format_value(text)}, but must be ends of names with positive "
            "numbers, such as k_proj=4,o_proj=16"
        )


def is_name_list(targets_setting: str) -> bool:
    """Returns whether `adapter.targets` lists module name suffixes, not a regular expression."""
    return _NAMES.fullmatch(targets_setting) is not None


def ends_with_name(module: str, name: str) -> bool:
    """Returns whether the last dotted parts of a module name are `name`."""
    return f".{module}".endswith(f".{name}")


def is_inside_module(module: str, name: str) -> bool:
    """Returns whether the name of a module, or of a module around it, ends with `name`.

    As in PEFT's `modules_to_save`, `name` can begin inside a word.
    """
    return any(outer.endswith(name) for outer in accumulate(module.split("."), "{}.{}".format))


def matches_end_of_name(module: str, expression: str) -> bool:
    """Returns whether a regular expression matches the end of a module name."""
    from config.regex_match import full_match

    return full_match(rf"(.*\.)?({expression})", module)


def first_matching_number(
    pattern: Mapping[str, float], names: Iterable[str], default: float
) -> float:
    """Returns the number that belongs to the first pattern matching the end of a module name."""
    for key, value in pattern.items():
        if any(matches_end_of_name(name, key) for name in names):
            return value
    return default
