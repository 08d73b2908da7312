"""PopXL on XLA: write programs of graphs, variables, remote buffers and replicas; run anywhere."""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from popxl import custom as custom
    from popxl import dtypes as dtypes
    from popxl import errors as errors
    from popxl import fp8_utils as fp8_utils
    from popxl import ops as ops
    from popxl import plan as plan
    from popxl import transforms as transforms
    from popxl.context import gcg as gcg
    from popxl.context import get_current_graph as get_current_graph
    from popxl.context import get_ir as get_ir
    from popxl.context import get_main_graph as get_main_graph
    from popxl.context import gir as gir
    from popxl.context import gmg as gmg
    from popxl.context import in_sequence as in_sequence
    from popxl.context import io_tiles as io_tiles
    from popxl.context import ipu as ipu
    from popxl.context import name_scope as name_scope
    from popxl.dtypes import bfloat16 as bfloat16
    from popxl.dtypes import bool as bool
    from popxl.dtypes import complex64 as complex64
    from popxl.dtypes import complex128 as complex128
    from popxl.dtypes import double as double
    from popxl.dtypes import dtype as dtype
    from popxl.dtypes import float as float
    from popxl.dtypes import float8_143 as float8_143
    from popxl.dtypes import float8_152 as float8_152
    from popxl.dtypes import float8_e4m3fn as float8_e4m3fn
    from popxl.dtypes import float8_e5m2 as float8_e5m2
    from popxl.dtypes import float16 as float16
    from popxl.dtypes import float32 as float32
    from popxl.dtypes import float64 as float64
    from popxl.dtypes import half as half
    from popxl.dtypes import int8 as int8
    from popxl.dtypes import int16 as int16
    from popxl.dtypes import int32 as int32
    from popxl.dtypes import int64 as int64
    from popxl.dtypes import uint8 as uint8
    from popxl.dtypes import uint16 as uint16
    from popxl.dtypes import uint32 as uint32
    from popxl.dtypes import uint64 as uint64
    from popxl.graph import Graph as Graph
    from popxl.ir import Ir as Ir
    from popxl.module import Module as Module
    from popxl.random_seed import create_seeds as create_seeds
    from popxl.remote_buffer import RemoteBuffer as RemoteBuffer
    from popxl.remote_buffer import remote_buffer as remote_buffer
    from popxl.replica_grouping import ReplicaGrouping as ReplicaGrouping
    from popxl.session import Session as Session
    from popxl.streams import DeviceToHostStream as DeviceToHostStream
    from popxl.streams import HostToDeviceStream as HostToDeviceStream
    from popxl.streams import d2h_stream as d2h_stream
    from popxl.streams import h2d_stream as h2d_stream
    from popxl.tensor import Constant as Constant
    from popxl.tensor import Tensor as Tensor
    from popxl.tensor import TensorByRef as TensorByRef
    from popxl.tensor import TensorSpec as TensorSpec
    from popxl.tensor import Variable as Variable
    from popxl.tensor import constant as constant
    from popxl.tensor import graph_input as graph_input
    from popxl.tensor import graph_output as graph_output
    from popxl.tensor import remote_replica_sharded_variable as remote_replica_sharded_variable
    from popxl.tensor import remote_variable as remote_variable
    from popxl.tensor import replica_sharded_buffer as replica_sharded_buffer
    from popxl.tensor import replica_sharded_variable as replica_sharded_variable
    from popxl.tensor import variable as variable
    from popxl.tensorlocation import ExecutionContext as ExecutionContext
    from popxl.tensorlocation import ReplicatedTensorSharding as ReplicatedTensorSharding
    from popxl.tensorlocation import TensorLocation as TensorLocation
    from popxl.tensorlocation import TensorStorage as TensorStorage
    from popxl.tensorlocation import TileSet as TileSet
else:
    lazy_exports(__name__)
