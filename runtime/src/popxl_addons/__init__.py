"""Modules, layers, optimizers and graph transforms on top of popxl."""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from popxl import Ir as Ir
    from popxl import ReplicaGrouping as ReplicaGrouping
    from popxl import Tensor as Tensor
    from popxl import dtypes as dtypes
    from popxl.context import get_current_context as get_current_context
    from popxl.tensor import HostTensor as HostTensor
    from popxl.transforms import ExpectedConnection as ExpectedConnection
    from popxl.transforms import ExpectedConnectionType as ExpectedConnectionType
    from popxl.transforms import GradGraphInfo as GradGraphInfo
    from popxl_addons import array_munging as array_munging
    from popxl_addons.array_munging import handle_negative_axis as handle_negative_axis
    from popxl_addons.array_munging import pad_axis as pad_axis
    from popxl_addons.array_munging import repeat as repeat
    from popxl_addons.array_munging import repeat_axis as repeat_axis
    from popxl_addons.array_munging import repeat_shard as repeat_shard
    from popxl_addons.array_munging import shard as shard
    from popxl_addons.array_munging import shard2D as shard2D
    from popxl_addons.array_munging import split2D as split2D
    from popxl_addons.array_munging import squeeze_safe as squeeze_safe
    from popxl_addons.array_munging import tensor_parallel_input as tensor_parallel_input
    from popxl_addons.array_munging import unshard as unshard
    from popxl_addons.array_munging import unshard2D as unshard2D
    from popxl_addons.array_munging import unshard_arrays as unshard_arrays
    from popxl_addons.debugging import print_tensor as print_tensor
    from popxl_addons.debugging import print_text as print_text
    from popxl_addons.dot_tree import DotTree as DotTree
    from popxl_addons.fp8 import CurrentScaling as CurrentScaling
    from popxl_addons.fp8 import DelayedScaling as DelayedScaling
    from popxl_addons.fp8 import fp8_autocast as fp8_autocast
    from popxl_addons.fp8 import update_fp8 as update_fp8
    from popxl_addons.graph import BoundGraph as BoundGraph
    from popxl_addons.graph import GraphWithNamedArgs as GraphWithNamedArgs
    from popxl_addons.graph_cache import GraphCache as GraphCache
    from popxl_addons.graph_cache import argument_hash as argument_hash
    from popxl_addons.graph_cache import bound_arguments as bound_arguments
    from popxl_addons.graph_cache import function as function
    from popxl_addons.graph_cache import get_function_hash as get_function_hash
    from popxl_addons.graph_cache import tensor_hash as tensor_hash
    from popxl_addons.graph_common import CalledGraphsGradInfo as CalledGraphsGradInfo
    from popxl_addons.graph_common import CalledGraphsGradInfoLike as CalledGraphsGradInfoLike
    from popxl_addons.graph_common import GradGraphInfoLike as GradGraphInfoLike
    from popxl_addons.graph_common import GraphLike as GraphLike
    from popxl_addons.module import Module as Module
    from popxl_addons.module import create_grad_graph_info as create_grad_graph_info
    from popxl_addons.named_replica_grouping import NamedReplicaGrouping as NamedReplicaGrouping
    from popxl_addons.named_tensors import NamedTensorData as NamedTensorData
    from popxl_addons.named_tensors import NamedTensors as NamedTensors
    from popxl_addons.ops import cross_entropy as cross_entropy
    from popxl_addons.ops import cross_entropy_with_grad as cross_entropy_with_grad
    from popxl_addons.ops import fp8_amax_scale as fp8_amax_scale
    from popxl_addons.ops import host_load as host_load
    from popxl_addons.ops import host_store as host_store
    from popxl_addons.performance_utils import evaluate_FLOPs as evaluate_FLOPs
    from popxl_addons.performance_utils import evaluate_ir_FLOPs as evaluate_ir_FLOPs
    from popxl_addons.performance_utils import format_flops_scientific as format_flops_scientific
    from popxl_addons.performance_utils import print_FLOPs as print_FLOPs
    from popxl_addons.performance_utils import total_FLOPs as total_FLOPs
    from popxl_addons.remote import NamedRemoteBuffers as NamedRemoteBuffers
    from popxl_addons.remote import create_remote_buffer as create_remote_buffer
    from popxl_addons.remote import load_remote_graph as load_remote_graph
    from popxl_addons.remote import named_buffers as named_buffers
    from popxl_addons.remote import named_variable_buffers as named_variable_buffers
    from popxl_addons.remote import store_remote_graph as store_remote_graph
    from popxl_addons.route_tensor import is_subgraph as is_subgraph
    from popxl_addons.route_tensor import route_tensor_into_graph as route_tensor_into_graph
    from popxl_addons.rts import (
        all_gather_replica_sharded_graph as all_gather_replica_sharded_graph,
    )
    from popxl_addons.rts import gather_replica_sharded_tensor as gather_replica_sharded_tensor
    from popxl_addons.rts import reduce_replica_sharded_graph as reduce_replica_sharded_graph
    from popxl_addons.rts import reduce_replica_sharded_tensor as reduce_replica_sharded_tensor
    from popxl_addons.rts import replica_sharded_spec as replica_sharded_spec
    from popxl_addons.seed_variable import seed_variable as seed_variable
    from popxl_addons.stochastic_rounding import (
        enable_stochastic_rounding as enable_stochastic_rounding,
    )
    from popxl_addons.stochastic_rounding import round_by_hash as round_by_hash
    from popxl_addons.stochastic_rounding import (
        seed_stochastic_rounding as seed_stochastic_rounding,
    )
    from popxl_addons.streams import InputStreams as InputStreams
    from popxl_addons.streams import OutputStreams as OutputStreams
    from popxl_addons.task_session import TaskSession as TaskSession
    from popxl_addons.task_session import write_variables_pb as write_variables_pb
    from popxl_addons.transforms import RemoteHandle as RemoteHandle
    from popxl_addons.transforms import add_recompute_inputs as add_recompute_inputs
    from popxl_addons.transforms import autodiff as autodiff
    from popxl_addons.transforms import autodiff_with_accumulation as autodiff_with_accumulation
    from popxl_addons.transforms import batch_serial_buffer as batch_serial_buffer
    from popxl_addons.transforms import batch_serialise as batch_serialise
    from popxl_addons.transforms import batch_serialise_fwd_and_grad as batch_serialise_fwd_and_grad
    from popxl_addons.transforms import disable_fc_pass as disable_fc_pass
    from popxl_addons.transforms import enable_fc_pass as enable_fc_pass
    from popxl_addons.transforms import pipelined_execution as pipelined_execution
    from popxl_addons.transforms import recompute_graph as recompute_graph
    from popxl_addons.transforms import (
        set_available_memory_proportion_by_ipu as set_available_memory_proportion_by_ipu,
    )
    from popxl_addons.transforms import (
        set_graph_available_memory_proportion_by_ipu as set_graph_available_memory_proportion_by_ipu,  # noqa: E501
    )
    from popxl_addons.utils import OrderedDict as OrderedDict
    from popxl_addons.utils import WeightsDict as WeightsDict
    from popxl_addons.utils import duplicate_items as duplicate_items
    from popxl_addons.utils import overrides as overrides
    from popxl_addons.utils import suffix_graph_name as suffix_graph_name
    from popxl_addons.utils import timer as timer
    from popxl_addons.variable_factory import NamedVariableFactories as NamedVariableFactories
    from popxl_addons.variable_factory import VariableFactory as VariableFactory
    from popxl_addons.variable_factory import (
        add_replica_sharded_variable_input as add_replica_sharded_variable_input,
    )
    from popxl_addons.variable_factory import add_variable_input as add_variable_input
    from popxl_addons.version import GIT_COMMIT as GIT_COMMIT
    from popxl_addons.version import __version__ as __version__
else:
    lazy_exports(__name__)
