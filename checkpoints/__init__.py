"""Checkpoints of a training run.

    with CheckpointStore("runs/mine", to_keep=4) as store:
        store.save(step, {"encoder.block.0....q.weight": array, ...}, {"seed": 42, ...})
    checkpoint = CheckpointStore("runs/mine").load()

Tensors are logical, that is whole: nothing in a checkpoint tells how the run that wrote it was
split over devices. Weights have their Hugging Face names; the optimizer's state is stored with them
as `optimizer/first_order/<name>` and the like. On disk a step is a folder of safetensors files and
a manifest with a SHA-256 digest of every tensor.

Why not Orbax. It was measured first (0.12.8, 20 arrays of 50 MB of float32, two cores) and fell
short in what matters most here:
- A flipped bit inside an array came back as a wrong number without an error, so that the digests
  would have been needed all the same.
- It takes the whole tree at once and peaked at 1.9 times its size on top of it; this takes one
  copy to save in the background, and none to save at once. Arrays can then be made, written and
  dropped one by one, which is the only way to save a state that fills the host's memory.
- It compresses what hardly compresses, and a save took two to four times as long.
"""

from checkpoints.errors import CheckpointError as CheckpointError
from checkpoints.errors import CheckpointWarning as CheckpointWarning
from checkpoints.errors import DamagedError as DamagedError
from checkpoints.loading import Checkpoint as Checkpoint
from checkpoints.loading import has_checkpoint as has_checkpoint
from checkpoints.loading import load_checkpoint as load_checkpoint
from checkpoints.safetensors_files import TensorSpec as TensorSpec
from checkpoints.store import CheckpointStore as CheckpointStore
from checkpoints.tensor_files import TensorFiles as TensorFiles
