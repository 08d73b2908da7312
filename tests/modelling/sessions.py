"""Sessions of a configuration, whose family is looked up."""

from __future__ import annotations

from config.sections import RunConfig
from modelling.finetuning import FineTuning
from modelling.inference import Inference
from modelling.spec import family_of


def fine_tuning(config: RunConfig, gradients: bool = False) -> FineTuning:
    return FineTuning(config, family_of(config), gradients)


def inference(config: RunConfig) -> Inference:
    return Inference(config, family_of(config))
