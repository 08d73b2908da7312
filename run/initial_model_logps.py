"""The log-probabilities by frozen models that an objective compares with."""

from __future__ import annotations

from collections.abc import Callable

from config.sections import RunConfig
from data.preference_samples import REF_LOGPS
from files.run_folder import RunFolder
from modelling.model_family import get_family
from modelling.objectives import make_objective
from run.initial_model import POLICY, REFERENCE, InitialModel
from run.initial_state import InitialState
from run.model_weights import has_adapters
from run.reference_logps import ReferenceLogps
from run.rollout_logps import RolloutLogps

InitialModelLogps = ReferenceLogps | RolloutLogps


def initial_model_logps_for_run(
    config: RunConfig, initial_state: InitialState, folder: RunFolder
) -> InitialModelLogps | None:
    """Return the log-probabilities that a training run compares with; None if it does not."""
    return _make(
        config,
        initial_state,
        lambda role: InitialModel.for_run(config, initial_state, folder, role),
    )


def initial_model_logps_from_checkpoint(
    config: RunConfig, initial_state: InitialState
) -> InitialModelLogps | None:
    """Return the log-probabilities with which the run in `checkpoint.load` compares; or None.

    Raises:
        UserError: `checkpoint.load` is no run that has them.
    """
    return _make(
        config,
        initial_state,
        lambda role: InitialModel.from_checkpoint(config, initial_state, role),
    )


def _make(
    config: RunConfig,
    initial_state: InitialState,
    make_initial_model: Callable[[str], InitialModel],
) -> InitialModelLogps | None:
    training = config.training
    if training.row_type == "rollout":
        policy = make_initial_model(_policy_role(config, initial_state))
        reference = None
        if training.resolved_beta:
            reference = policy if policy.role == REFERENCE else make_initial_model(REFERENCE)
        return RolloutLogps(policy, reference, training.temperature)
    if REF_LOGPS in make_objective(config).sequence_inputs:
        return ReferenceLogps(make_initial_model(REFERENCE))
    return None


def _policy_role(config: RunConfig, initial_state: InitialState) -> str:
    """Return the role of the model that wrote rollouts: that of the reference without adapters.

    New adapters change nothing yet.
    """
    checkpoint = initial_state.checkpoint
    metadata = checkpoint.metadata if initial_state.step and checkpoint is not None else {}
    if {REFERENCE, POLICY} & metadata.keys():
        return POLICY if POLICY in metadata else REFERENCE
    weight_map = get_family(config).weight_map(config)
    is_trained = checkpoint is not None and has_adapters(weight_map, checkpoint)
    is_new = config.adapter.load is None and not is_trained
    return REFERENCE if is_new or not config.adapter.rank else POLICY
