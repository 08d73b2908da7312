"""Low-rank adapters (Hu et al., arXiv:2106.09685), with the settings of PEFT's LoRA."""

from __future__ import annotations

import re
from dataclasses import dataclass

from config.base import Section
from config.errors import ConfigError
from config.values import Names, NonNegativeInt, PathText, PositiveFloat, Probability, listed

ALL_LINEAR = "all-linear"
_NAMES = re.compile(r"[\w.-]+(,[\w.-]+)*")


@dataclass(frozen=True)
class Adapter(Section):
    """Matrices A and B of low rank that are trained beside frozen linear maps: W x + s B A x."""

    rank: NonNegativeInt = 0
    """Rows of A and columns of B; 0: no adapters, all weights are trained. PEFT: r."""

    alpha: PositiveFloat = 8.0
    """What they add is scaled by alpha / rank. PEFT: lora_alpha."""

    dropout: Probability = 0.0
    """Probability that an element of what A reads becomes 0 in training. PEFT: lora_dropout."""

    rslora: bool = False
    """Scale by alpha / √rank instead (arXiv:2312.03732). PEFT: use_rslora."""

    targets: Names | None = None
    """Which linear maps have them: ends of Hugging Face's names, separated by commas; all-linear,
    without the head; or a regular expression for whole names. null: queries and values. PEFT:
    target_modules."""

    rank_pattern: str | None = None
    """Other ranks by the end of the name, such as k_proj=4,o_proj=16. PEFT: rank_pattern."""

    alpha_pattern: str | None = None
    """Other alphas, likewise. PEFT: alpha_pattern."""

    modules_to_save: Names | None = None
    """Modules that are trained whole, by the ends of their names, separated by commas. PEFT:
    modules_to_save."""

    load: PathText | None = None
    """Folder of an adapter to begin with, as PEFT writes it, which says all of the above."""

    def validate(self) -> None:
        if self.targets is not None and not self._names_or_expression(self.targets):
            raise ConfigError(
                f"adapter.targets is {self.targets!r}, which is no regular expression: give names "
                f"such as q_proj,v_proj, or {ALL_LINEAR}"
            )
        self.rank_of("")
        self.alpha_of("")
        if any(rank < 1 or rank % 1 for rank in _pattern("rank_pattern", self.rank_pattern).values()):
            raise ConfigError(f"adapter.rank_pattern {self.rank_pattern!r} needs positive integers")

    @staticmethod
    def _names_or_expression(text: str) -> bool:
        try:
            return bool(re.compile(text))
        except re.error:
            return False

    def is_target(self, module: str, default: str) -> bool:
        """Whether a linear map inside the model has an adapter.

        Args:
            module: Hugging Face's name of it.
            default: the family's targets.
        """
        targets = self.targets or default
        if targets == ALL_LINEAR:
            return True
        if _NAMES.fullmatch(targets):
            return _ends(module, targets)
        return re.fullmatch(targets, module) is not None

    def is_saved(self, module: str) -> bool:
        """Whether a module is trained whole."""
        return self.modules_to_save is not None and _ends(module, self.modules_to_save)

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return int(_matching(_pattern("rank_pattern", self.rank_pattern), module, self.rank))

    def alpha_of(self, module: str) -> float:
        """The alpha of a module's adapter."""
        return _matching(_pattern("alpha_pattern", self.alpha_pattern), module, self.alpha)

    def scale_of(self, module: str) -> float:
        """The factor on what a module's adapter adds."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (rank**0.5 if self.rslora else rank)


def _ends(module: str, names: str) -> bool:
    """Whether a module's name ends with one of those between commas."""
    return any(f".{module}".endswith(f".{name}") for name in listed(names))


def _pattern(field: str, text: str | None) -> dict[str, float]:
    """Numbers by regular expressions for the ends of names."""
    pairs = [pair.rpartition("=") for pair in listed(text)]
    try:
        found = {key.strip(): float(value) for key, _, value in pairs}
        if all(found) and all(re.compile(key) and value > 0 for key, value in found.items()):
            return found
    except (ValueError, re.error):
        pass
    raise ConfigError(
        f"adapter.{field} is {text!r}, but must be names with positive numbers, such as "
        "k_proj=4,o_proj=16"
    )


def _matching(pattern: dict[str, float], module: str, default: float) -> float:
    """The number of the first expression that the end of a name matches."""
    for key, value in pattern.items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default
