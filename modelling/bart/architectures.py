"""Constants of each model type: how BART and its relatives differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BartArchitecture:
    """Constants of one model type.

    Attributes:
        cls: transformers' class.
        is_pre_norm: True if norms come before attention and feed-forward, and each stack ends with
            one; False if they come after each residual sum.
        has_embedding_norm: True if a norm follows the sum of tokens and positions.
        positions: learned; sinusoidal in files and in the weight map ("stored"), or nowhere
            ("computed").
        has_logit_bias: True if the logits have a bias, which is not trained.
    """

    cls: str
    is_pre_norm: bool = False
    has_embedding_norm: bool = False
    positions: Literal["learned", "stored", "computed"] = "learned"
    has_logit_bias: bool = True


ARCHITECTURES = {
    "bart": BartArchitecture("BartForConditionalGeneration", has_embedding_norm=True),
    "mbart": BartArchitecture(
        "MBartForConditionalGeneration", is_pre_norm=True, has_embedding_norm=True
    ),
    "m2m_100": BartArchitecture(
        "M2M100ForConditionalGeneration",
        is_pre_norm=True,
        positions="computed",
        has_logit_bias=False,
    ),
    "marian": BartArchitecture("MarianMTModel", positions="stored"),
    "pegasus": BartArchitecture(
        "PegasusForConditionalGeneration", is_pre_norm=True, positions="stored"
    ),
}
