"""Pipelined programs over the IPUs of a replica: stages, and tensors that pass between them.

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
from popxl._analysis.alias_analysis import owners
from popxl.ops import CallSiteInfo
from popxl.transforms import GradGraphInfo
from popxl_addons.grad_info import is_fwd
from popxl_addons.transforms.move_ops import move_ops

__all__ = ["StageContext", "pipelined_execution"]


class StageContext:
    """Handle of `pipelined_execution` that marks stages and passes tensors between them.

    Attributes:
        ops: stage -> the ops of the pipeline that are in it.
    """

    def __init__(self) -> None:
        self.ops: dict[int, list[Any]] = {}
        self._graph = popxl.gcg()
        self._stages: list[int] = []  # those that are entered

    def hook(self, op: Any) -> None:
        """Record the pipeline stage in which `op` was created.

        Raises:
            RuntimeError: there is none.
        """
        if op.graph is not self._graph:
            return
        if not self._stages:
            raise RuntimeError(
                f"{op.name} ({op.location}) is in a pipeline but in none of its stages: make it "
                "inside `with pipeline.stage(i):`"
            )
        self.ops.setdefault(self._stages[-1], []).append(op)

    @contextmanager
    def stage(self, i: int) -> Iterator[None]:
        """Context manager: ops created inside belong to stage `i` (from 0); the innermost wins."""
        self._stages.append(i)
        try:
            yield
        finally:
            self._stages.pop()

    def _stage_of(self, t: Tensor) -> int | None:
        """Return the pipeline stage of the op that outputs `t`; None if it is outside."""
        return next((i for i, made in self.ops.items() if t._producer in made), None)

    def stash_and_restore_tensor(self, t: Tensor, from_stage: int | None = None) -> Tensor:
        """Return `t` for use in a later stage: itself, since one micro-batch runs at a time.

        Args:
            from_stage: where `t` comes from; default: the stage of the op that makes it.

        Raises:
            RuntimeError: outside a stage; or no op of the pipeline makes `t` and `from_stage` is
                not given.
            TypeError: `t` comes from this stage.
        """
        if not self._stages:
            raise RuntimeError(f"tensor {t.id!r} is stashed outside a stage of the pipeline")
        source = self._stage_of(t) if from_stage is None else from_stage
        if source is None:
            raise RuntimeError(
                f"no stage of the pipeline makes tensor {t.id!r}: say where it comes from with "
                "from_stage"
            )
        if source == self._stages[-1]:
            raise TypeError(f"tensor {t.id!r} comes from stage {source} itself: use it as it is")
        return t

    def stash_and_restore_activations(
        self, call_info: CallSiteInfo, grad_info: GradGraphInfo
    ) -> dict[Tensor, Tensor]:
        """Return those forward tensors that the gradient graph of a later stage takes as inputs.

        Returns:
            Tensors by input of the gradient graph, for `inputs_dict`. Variables, and what this
            stage makes itself, need no stash.
        """
        arguments = {}
        for t, expected in zip(grad_info.graph.inputs, grad_info.expected_inputs, strict=False):
            if is_fwd(expected):
                value = call_info.graph_to_parent(expected.fwd_tensor)
                stashed = self._stage_of(value) not in (None, *self._stages[-1:])
                arguments[t] = self.stash_and_restore_tensor(value) if stashed else value
        return arguments


@contextmanager
def pipelined_execution(steps: int) -> Iterator[StageContext]:
    """Context manager: ops created inside run `steps` times, once per micro-batch.

    Tensors created inside cannot be used after it: store them to streams, or accumulate them in
    variables.

    Raises:
        ValueError: `steps` is less than 1.
        RuntimeError: an op is made outside any stage.
    """
    if steps < 1:
        raise ValueError(f"a pipeline needs at least 1 step, got {steps}")
    graph = popxl.gcg()
    before = set(graph.ops)
    pipeline, context = StageContext(), popxl.context.get_current_context()
    handle = context.register_op_created_hook(pipeline.hook)
    try:
        yield pipeline
    finally:
        context.remove_op_created_hook(handle)
    moved = [op for op in graph.ops if op not in before]
    changed = {o for op in moved for i in op.modified_inputs() for o in owners(op.inputs[i])}
    body, inputs = move_ops(graph, moved, "pipeline_step", lambda t: t in changed)
    ops.repeat(body, steps, *inputs)
