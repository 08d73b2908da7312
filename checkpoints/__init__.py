"""Checkpoints of a training run: safetensors files that are sharded, verified and mirrored.

    with CheckpointStore("runs/mine", to_keep=4) as store:
        store.save(step, {"encoder.block.0....q.weight": array, ...}, {"seed": 42, ...})
    checkpoint = CheckpointStore("runs/mine").load()

Tensors are logical, that is unsharded: a checkpoint does not depend on the number of devices of the
run that wrote it. Weights have their Hugging Face names, optimizer state has names such as
`optimizer/first_order/<name>`. On disk a step is a folder of safetensors files and a manifest with
SHA-256 digests of every tensor.

Orbax was measured first (0.12.8, 20 arrays of 50 MB of float32, two cores) and not used because:
- A flipped bit inside an array was loaded as a wrong number without an error, so digests would have
  been needed anyway.
- It takes the full tree at once and peaked at 1.9 times its size on top. Saving here needs one copy
  in the background, and none when the caller waits: arrays are computed, written and freed one by
  one, which is the only way to save a state that fills the host's memory.
- It compresses data that hardly compresses; a save took two to four times as long.
"""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from checkpoints.errors import CheckpointError as CheckpointError
    from checkpoints.errors import CheckpointWarning as CheckpointWarning
    from checkpoints.errors import DamagedCheckpointError as DamagedCheckpointError
    from checkpoints.safetensors_files import ArraySpec as ArraySpec
    from checkpoints.store import CheckpointStore as CheckpointStore
    from checkpoints.tensor_files import TensorFiles as TensorFiles
    from checkpoints.verified_loading import SavedCheckpoint as SavedCheckpoint
    from checkpoints.verified_loading import has_checkpoint as has_checkpoint
    from checkpoints.verified_loading import load_checkpoint as load_checkpoint
else:
    lazy_exports(__name__)
