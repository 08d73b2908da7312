"""What a program needs and does, without running it: memory, traffic, operations, collectives.

    with popxl.plan.part("head"):
        loss = ops.sum(ops.gelu(x @ w))
    ...
    plan = popxl.plan.plan_of(ir)       # needs no devices
    plan.device, plan.host, plan.flops  # of one run
    plan.parts                          # by label

The plan is computed from the program's graphs: `trace` writes them as the values and nodes that
XLA gets, `merge` and `prune` leave out what is there twice or for nothing, `tally` adds up what is
done. For memory, `hoist` moves what loops compute in advance, `fusion` says which values are in
memory, `order` in which order they are made, and `liveness` how many there are at a time.
"""

from popxl.context import part as part
from popxl.plan.memory import device_memory as device_memory
from popxl.plan.plan import plan_of as plan_of
from popxl.plan.plan import storage_of as storage_of
from popxl.plan.records import Collective as Collective
from popxl.plan.records import MemoryUse as MemoryUse
from popxl.plan.records import Part as Part
from popxl.plan.records import Plan as Plan
from popxl.plan.records import Storage as Storage
