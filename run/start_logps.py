"""The log-probabilities by frozen models that an objective compares with."""

from __future__ import annotations

from collections.abc import Callable

from config.sections import RunConfig
from data.preference_samples import REF_LOGPS
from files.run_folder import RunFolder
from modelling.model_family import get_family
from modelling.objectives import make_objective
from run.initial_state import InitialState
from run.model_weights import has_adapters
from run.reference_logps import ReferenceLogps
from run.rollout_logps import RolloutLogps
from run.start_model import POLICY, REFERENCE, StartModel

StartLogps = ReferenceLogps | RolloutLogps


def start_logps_for_run(
    config: RunConfig, start: InitialState, folder: RunFolder
) -> StartLogps | None:
    """Return the log-probabilities that a training run compares with; None if it does not."""
    return _make(config, start, lambda role: StartModel.for_run(config, start, folder, role))


def start_logps_from_checkpoint(config: RunConfig, start: InitialState) -> StartLogps | None:
    """Return the log-probabilities with which the run in `checkpoint.load` compares; or None.

    Raises:
        UserError: `checkpoint.load` is no run that has them.
    """
    return _make(config, start, lambda role: StartModel.from_checkpoint(config, start, role))


def _make(
    config: RunConfig, start: InitialState, start_model: Callable[[str], StartModel]
) -> StartLogps | None:
    training = config.training
    if training.row_type == "rollout":
        policy = start_model(_policy_role(config, start))
        reference = None
        if training.resolved_beta:
            reference = policy if policy.role == REFERENCE else start_model(REFERENCE)
        return RolloutLogps(policy, reference, training.temperature)
    if REF_LOGPS in make_objective(config).sequence_inputs:
        return ReferenceLogps(start_model(REFERENCE))
    return None


def _policy_role(config: RunConfig, start: InitialState) -> str:
    """Return the role of the model that wrote rollouts: that of the reference without adapters.

    New adapters change nothing yet.
    """
    checkpoint = start.checkpoint
    metadata = checkpoint.metadata if start.step and checkpoint is not None else {}
    if {REFERENCE, POLICY} & metadata.keys():
        return POLICY if POLICY in metadata else REFERENCE
    weight_map = get_family(config).weight_map(config)
    is_trained = checkpoint is not None and has_adapters(weight_map, checkpoint)
    is_new = config.adapter.load is None and not is_trained
    return REFERENCE if is_new or not config.adapter.rank else POLICY
