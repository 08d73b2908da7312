"""Build the program of a configuration. Training, evaluation and generation all do it this way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import popxl
from config.sections import RunConfig
from modelling.fp8 import linear_layers
from modelling.layers.parallel import Groups
from modelling.layers.run_config import configured
from popxl_addons.patterns import apply_pre_alias_patterns


@contextmanager
def building(config: RunConfig) -> Iterator[tuple[popxl.Ir, Groups]]:
    """Build an Ir for the replicas of a configuration, which all processes share equally.

    What the context adds goes to the main graph. Linear layers made in it multiply in FP8 if the
    configuration says so.

    Yields:
        The Ir, complete when the context ends, and its replica groups.
    """
    ir = popxl.Ir(replication="popdist")
    ir.replication_factor = config.replicas
    with ir.main_graph, configured(config), linear_layers(config):
        yield ir, Groups.current(config.execution.tensor_parallel)
    apply_pre_alias_patterns(ir, level="default")
