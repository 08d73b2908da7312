"""The program of docs/planning.md: a plan and its parts."""

from __future__ import annotations

# [plan]
import numpy as np

import popxl
from popxl import ops

ir = popxl.Ir(replication=2)
with ir.main_graph:
    weights = popxl.remote_buffer((512, 512), popxl.float32, entries=12)
    x = popxl.variable(np.zeros((64, 512), np.float32))

    def layer(row: popxl.Tensor, x: popxl.Tensor) -> list[popxl.Tensor]:
        with popxl.plan.part("weights"):
            w = ops.remote_load(weights, row)
        with popxl.plan.part("layer"):
            return [row + 1, ops.collectives.replicated_all_reduce(ops.gelu(x @ w))]

    first = popxl.constant(0, popxl.int32)
    _, y = ops.repeat(ir.create_graph(layer, first, x), 12, first, x)
    ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "y"), y)

plan = popxl.plan.plan_of(ir)
for part in plan.parts:
    name = part.name or "the rest"
    print(f"{name:8} {part.flops:12,} operations {part.host_to_device:12,} bytes loaded")
print(f"{plan.device_bytes:,} bytes on each device, {plan.host_bytes:,} in host memory")
# [end]
