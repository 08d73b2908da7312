"""Creates the popxl Ir of a configuration, for training, evaluation and generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import popxl
import popxl_addons as addons
from config.sections import RunConfig
from modelling.layers.parallel import ParallelGroups
from modelling.layers.run_config import use_run_config


@contextmanager
def build_ir(config: RunConfig) -> Iterator[tuple[popxl.Ir, ParallelGroups]]:
    """Creates an Ir for a configuration's replicas, spread evenly over the processes.

    Ops in the context go to the main graph; linear layers created in it use FP8 if it is
    configured.

    Yields:
        The Ir, complete when the context ends, and its replica groups.
    """
    ir = popxl.Ir(replication="popdist")
    ir.replication_factor = config.num_replicas
    if config.execution.io_tiles is not None:
        ir._pb_ir.getSessionOptions().numIOTiles = config.execution.io_tiles
    with ir.main_graph, use_run_config(config), ExitStack() as stack:
        if config.fp8.enabled:
            from modelling.fp8 import make_fp8_recipe

            stack.enter_context(addons.fp8_autocast(make_fp8_recipe(config)))
        yield ir, ParallelGroups.from_current_ir(config.execution.tensor_parallel)
    if config.execution.tensor_parallel > 1:
        from popxl_addons.patterns import apply_pre_alias_patterns

        apply_pre_alias_patterns(ir, level="default")
    if config.execution.available_memory_proportion is not None:
        addons.set_available_memory_proportion_by_ipu(
            ir, [config.execution.available_memory_proportion]
        )
