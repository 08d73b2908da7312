"""Training of models larger than device memory in phases: one layer on the device at a time.

A model is split into phases (embeddings, layers, head). The variables of a phase are loaded from
remote buffers and gathered; then all micro-batches of a pass run through it, with activations in
rows of remote buffers.
"""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from modelling.phases.buffers import ActivationBuffers as ActivationBuffers
    from modelling.phases.buffers import InputBuffers as InputBuffers
    from modelling.phases.buffers import LayerIO as LayerIO
    from modelling.phases.buffers import loop_over_layers as loop_over_layers
    from modelling.phases.decoder_only import build_decoder_only_phases as build_decoder_only_phases
    from modelling.phases.encoder_decoder import (
        build_encoder_decoder_phases as build_encoder_decoder_phases,
    )
    from modelling.phases.loss_phase import LossPhase as LossPhase
    from modelling.phases.phase import Phase as Phase
    from modelling.phases.phase_plan import PhasePlan as PhasePlan
    from modelling.phases.phase_plan import PhaseRun as PhaseRun
    from modelling.phases.settings import PhaseSettings as PhaseSettings
    from modelling.phases.step_inputs import StepInputs as StepInputs
else:
    lazy_exports(__name__)
