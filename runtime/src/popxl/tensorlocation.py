"""Tensor locations: recorded for programs that set them; XLA places tensors itself."""

from __future__ import annotations

from enum import Enum


class TileSet(Enum):
    Compute = "Compute"
    IO = "IO"


class ExecutionContext(Enum):
    Normal = "Normal"
    WeightsFromHostFragment = "WeightsFromHostFragment"
    WeightsToHostFragment = "WeightsToHostFragment"
    OptimizerFromHostFragment = "OptimizerFromHostFragment"


class TensorStorage(Enum):
    OnChip = "OnChip"
    OffChip = "OffChip"


class ReplicatedTensorSharding(Enum):
    On = "On"
    Off = "Off"


class TensorLocation:
    """Storage (device or remote) and sharding of a tensor, as recorded for the program."""

    def __init__(
        self,
        storage: TensorStorage = TensorStorage.OnChip,
        replicated_tensor_sharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off,
    ) -> None:
        self._storage = storage
        self._sharding = replicated_tensor_sharding

    @property
    def storage(self) -> TensorStorage:
        return self._storage

    @property
    def replicated_tensor_sharding(self) -> ReplicatedTensorSharding:
        return self._sharding
