"""Transforms of graphs with named inputs, such as autodiff and recomputation."""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from popxl.transforms import ExpectedConnection as ExpectedConnection
    from popxl.transforms import ExpectedConnectionType as ExpectedConnectionType
    from popxl.transforms import GradGraphInfo as GradGraphInfo
    from popxl_addons.graph import BoundGraph as BoundGraph
    from popxl_addons.graph import GraphWithNamedArgs as GraphWithNamedArgs
    from popxl_addons.transforms import repeat_graph as repeat_graph
    from popxl_addons.transforms.autodiff import autodiff as autodiff
    from popxl_addons.transforms.autodiff import (
        autodiff_with_accumulation as autodiff_with_accumulation,
    )
    from popxl_addons.transforms.available_memory_proportion import (
        set_available_memory_proportion_by_ipu as set_available_memory_proportion_by_ipu,
    )
    from popxl_addons.transforms.available_memory_proportion import (
        set_graph_available_memory_proportion_by_ipu as set_graph_available_memory_proportion_by_ipu,  # noqa: E501
    )
    from popxl_addons.transforms.batch_serialisation import BatchSerialResult as BatchSerialResult
    from popxl_addons.transforms.batch_serialisation import RemoteHandle as RemoteHandle
    from popxl_addons.transforms.batch_serialisation import (
        batch_serial_buffer as batch_serial_buffer,
    )
    from popxl_addons.transforms.batch_serialisation import batch_serialise as batch_serialise
    from popxl_addons.transforms.batch_serialisation import (
        batch_serialise_fwd_and_grad as batch_serialise_fwd_and_grad,
    )
    from popxl_addons.transforms.pipelining import pipelined_execution as pipelined_execution
    from popxl_addons.transforms.recomputation import add_recompute_inputs as add_recompute_inputs
    from popxl_addons.transforms.recomputation import recompute_graph as recompute_graph
    from popxl_addons.transforms.use_fc_pass import disable_fc_pass as disable_fc_pass
    from popxl_addons.transforms.use_fc_pass import enable_fc_pass as enable_fc_pass
    from popxl_addons.utils import suffix_graph_name as suffix_graph_name
else:
    lazy_exports(__name__)
