"""Programs written as pipelines over the IPUs of a replica.

On IPUs the stages of different micro-batches run at the same time. Here a replica is one device,
whose stages would only take turns, so a pipeline is a loop: in each step one micro-batch goes
through all stages. Results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import popxl
from popxl import Tensor, ops
from popxl._core.aliases import owners
from popxl.ops import CallSiteInfo
from popxl.transforms import GradGraphInfo
from popxl_addons.grad_info import is_fwd
from popxl_addons.transforms.moving import move_ops

__all__ = ["StageContext", "pipelined_execution"]


class StageContext:
    """What `pipelined_execution` gives: marks stages and passes tensors between them.

    Attributes:
        ops: stage -> the ops of the pipeline that are in it.
    """

    def __init__(self) -> None:
        self.ops: dict[int, list[Any]] = {}
        self._current: int | None = None

    def hook(self, op: Any) -> None:
        """Note that `op` was created, in the stage that is entered now."""
        if self._current is not None:
            self.ops.setdefault(self._current, []).append(op)

    @contextmanager
    def stage(self, i: int) -> Iterator[None]:
        """Put the ops created inside in stage `i`, counted from 0. Stages do not nest."""
        if self._current is not None:
            raise ValueError(f"stage {i} cannot be inside stage {self._current}")
        context = popxl.context.get_current_context()
        handle = context.register_op_created_hook(self.hook)
        self._current = i
        try:
            yield
        finally:
            self._current = None
            context.remove_op_created_hook(handle)

    def stash_and_restore_tensor(self, t: Tensor, from_stage: int | None = None) -> Tensor:
        """`t` for use in a later stage: one micro-batch is under way, so it is `t` itself."""
        return t

    def stash_and_restore_activations(
        self, call_info: CallSiteInfo, grad_info: GradGraphInfo
    ) -> dict[Tensor, Tensor]:
        """What a gradient graph in a later stage expects from the forward call.

        Returns:
            Tensors by input of the gradient graph, for `inputs_dict`.
        """
        return {
            t: self.stash_and_restore_tensor(call_info.graph_to_parent(connection.fwd_tensor))
            for t, connection in zip(
                grad_info.graph.inputs, grad_info.expected_inputs, strict=False
            )
            if is_fwd(connection)
        }


@contextmanager
def pipelined_execution(steps: int) -> Iterator[StageContext]:
    """Run the ops created inside `steps` times, once for each micro-batch.

    Tensors created inside cannot be used after it: store them to streams, or accumulate them in
    variables.

    Raises:
        ValueError: `steps` is less than 1.
    """
    if steps < 1:
        raise ValueError(f"a pipeline needs at least 1 step, got {steps}")
    graph = popxl.gcg()
    before = set(graph.ops)
    yield StageContext()
    moved = [op for op in graph.ops if op not in before]
    changed = {o for op in moved for i in op.modified_inputs() for o in owners(op.inputs[i])}
    body, inputs = move_ops(graph, moved, "pipeline_step", lambda t: t in changed)
    ops.repeat(body, steps, *inputs)
