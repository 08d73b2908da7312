"""Initial state of a run: its weights, and the state to resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from checkpoints.errors import DamagedCheckpointError
from config.run import RANDOM
from config.sections import RunConfig
from modelling.weights import WeightMap

if TYPE_CHECKING:
    from checkpoints import SavedCheckpoint
    from checkpoints.lazy_arrays import Arrays
    from run.base_model_ref import BaseModelRef
    from run.weight_checks import DigestCheckedTensors

Used = TypeVar("Used")


@dataclass(frozen=True)
class InitialState:
    """Weights and training state that a run starts from.

    Attributes:
        tensors: weights by logical name and, for a resumed run, optimizer state.
        digest_checked: the tensors whose digests must not change while a run starts to train.
        step: number of optimizer steps done.
        data: state of the data loader; None: start of the data.
        source: origin of the state, for messages.
        skipped_steps: number of skipped optimizer steps so far.
        best: state of the best checkpoint; None: none.
        sha256: digest of the files that were read, if known.
        checkpoint: the checkpoint, if the state is from one.
        base: reference to the model of the frozen weights; None: unknown.
        reload: resolves the state again.
        restart_hint: advice on how to start a new run instead of resuming.
    """

    tensors: Arrays
    digest_checked: DigestCheckedTensors | None = None
    step: int = 0
    data: dict[str, Any] | None = None
    source: str = "random weights"
    skipped_steps: int = 0
    best: dict[str, Any] | None = None
    sha256: str = ""
    checkpoint: SavedCheckpoint | None = None
    base: BaseModelRef | None = None
    reload: Callable[[], InitialState] | None = None
    restart_hint: str = ""

    def load_with_fallback(
        self, use_state: Callable[[InitialState], Used]
    ) -> tuple[InitialState, Used]:
        """Call `use_state` with this state; if it is damaged, with the state of the previous step.

        Values are verified when they are read, so that each is read once.

        Args:
            use_state: raises DamagedCheckpointError on all processes, as sessions do.

        Returns:
            The state that was used, and the result of `use_state`.

        Raises:
            CheckpointError: there is no undamaged step.
        """
        start = self
        while True:
            try:
                return start, use_state(start)
            except DamagedCheckpointError as error:
                if start.checkpoint is None or start.reload is None:
                    raise
                start.checkpoint.mark_damaged(str(error))
            start = start.reload()


def with_reload_function(find_state: Callable[[], InitialState]) -> InitialState:
    """Return an initial state that, if found damaged, can be resolved again by `find_state`."""
    return replace(find_state(), reload=partial(with_reload_function, find_state))


def random_initial_state(config: RunConfig, weight_map: WeightMap) -> InitialState | None:
    """Return random weights if a run starts from them and nothing refers to them later.

    Otherwise None: `run.resume` then reads files, and digests of weights that stay frozen.
    """
    checkpoint = config.checkpoint
    is_referred_to = (
        checkpoint.save is not None
        or config.training.row_type is not None  # its objective compares with these weights
        or config.model.quant is not None
        or config.adapter.rank
        or weight_map.frozen_names
    )
    if is_referred_to or checkpoint.load not in (None, RANDOM):
        return None
    return InitialState(weight_map.init_weights(config.model.seed))
