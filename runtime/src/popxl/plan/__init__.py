"""Plans: predicted memory, traffic, FLOPs, collectives and time of programs, without a run.

    with popxl.plan.part("head"):
        loss = ops.sum(ops.gelu(x @ w))
    ...
    plan = popxl.plan.plan_of(ir)  # needs no devices
    plan.device_bytes, plan.host_bytes, plan.flops  # of one run
    plan.parts  # by label

    traced = popxl.plan.trace_program(ir, "gpu")
    traced.timeline(rates)      # a run on a simulated device: exposed transfers and idle time

A plan walks the schedule that a session would run, with sizes in place of arrays (`cost_walk`). The
cost of a segment is read off the function that XLA would compile (`segment_cost`), and so is the
memory of its temporaries, as long as XLA has not compiled it (`memory_estimate`).
"""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from popxl._devices.mesh import MEMORY_FRACTION as MEMORY_FRACTION
    from popxl._storage.disk_window import DISK_WINDOW as DISK_WINDOW
    from popxl._storage.replica_arrays import variable_shards as variable_shards
    from popxl.context import part as part
    from popxl.hardware import device_memory as device_memory
    from popxl.plan.gc_pause import gc_disabled as gc_disabled
    from popxl.plan.placement import MARGIN as MARGIN
    from popxl.plan.placement import AllHostSimulation as AllHostSimulation
    from popxl.plan.placement import PlacedKind as PlacedKind
    from popxl.plan.placement import Placement as Placement
    from popxl.plan.placement import estimate_placed as estimate_placed
    from popxl.plan.placement import place_entries as place_entries
    from popxl.plan.plan import TracedProgram as TracedProgram
    from popxl.plan.plan import memory_use as memory_use
    from popxl.plan.plan import plan_of as plan_of
    from popxl.plan.plan import plan_of_program as plan_of_program
    from popxl.plan.plan import trace_program as trace_program
    from popxl.plan.rates import Rates as Rates
    from popxl.plan.records import Collective as Collective
    from popxl.plan.records import Kernel as Kernel
    from popxl.plan.records import MemoryUse as MemoryUse
    from popxl.plan.records import Plan as Plan
    from popxl.plan.records import RegionCost as RegionCost
    from popxl.plan.scratch_file import scratch_file as scratch_file
    from popxl.plan.storage import Storage as Storage
    from popxl.plan.storage import storage_of as storage_of
    from popxl.plan.time_estimate import StagedTimeEstimate as StagedTimeEstimate
    from popxl.plan.timeline import ExposedTime as ExposedTime
    from popxl.plan.timeline import Timeline as Timeline
    from popxl.plan.timeline import timeline as timeline
else:
    lazy_exports(__name__)
