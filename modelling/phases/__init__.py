"""Phased execution, once for all families.

A model is cut into phases (a layer, the embeddings, the head). One phase at a time is on the
device: its variables are loaded from remote buffers and gathered, then all micro-batches of the
step pass through it, read from and written to rows of activation buffers.
"""

from modelling.phases.alike import layers_alike as layers_alike
from modelling.phases.buffers import Chain as Chain
from modelling.phases.buffers import InputBuffers as InputBuffers
from modelling.phases.buffers import Port as Port
from modelling.phases.buffers import over_layers as over_layers
from modelling.phases.decoder_only import decoder_only_layout as decoder_only_layout
from modelling.phases.encoder_decoder import encoder_decoder_layout as encoder_decoder_layout
from modelling.phases.layout import Layout as Layout
from modelling.phases.layout import Stage as Stage
from modelling.phases.loss_phase import LossPhase as LossPhase
from modelling.phases.phase import Phase as Phase
from modelling.phases.settings import Settings as Settings
from modelling.phases.step import StepInputs as StepInputs
