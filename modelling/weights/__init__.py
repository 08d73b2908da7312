"""The map, in both directions, between a program's variables and Hugging Face's tensors.

`mapping` describes how one variable is made of weights; `weight_map` has the mappings of a model;
`variables` locates weights in a program's variables; `hf_tensor_names` and `mxfp4` read Hugging
Face's files; `optimizer_state` converts optimizer state of checkpoints; `trainable` and `lora`
select what is trained.
"""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from modelling.weights.variables import OPTIMIZER_PREFIX as OPTIMIZER_PREFIX
    from modelling.weights.variables import ShardReader as ShardReader
    from modelling.weights.variables import total_nbytes as total_nbytes
    from modelling.weights.variables import without_optimizer_state as without_optimizer_state
    from modelling.weights.weight_map import EXPERT_GROUP as EXPERT_GROUP
    from modelling.weights.weight_map import FP8_PREFIX as FP8_PREFIX
    from modelling.weights.weight_map import Variables as Variables
    from modelling.weights.weight_map import WeightMap as WeightMap
    from modelling.weights.weight_mapping import LoraSpec as LoraSpec
    from modelling.weights.weight_mapping import Weight as Weight
    from modelling.weights.weight_mapping import WeightMapping as WeightMapping
    from modelling.weights.weight_mapping import WeightsError as WeightsError
else:
    lazy_exports(__name__)
