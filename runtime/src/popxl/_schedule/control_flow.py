"""Calls, loops and branches that the host executes, as steps of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from popxl._schedule.routine_builder import RoutineBuilder
from popxl._schedule.schedule import Branch, CallArgs, Loop, Register, Routine

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph, Node
    from popxl._ir.regions import Region


class ControlFlow:
    """Adds call, loop and branch steps to the routine (host steps) of a graph."""

    def __init__(self, builder: RoutineBuilder, routine_of: Callable[..., Routine]) -> None:
        """Get the routines of graphs from `routine_of` (`_ScheduleBuilder.get_routine`)."""
        self._builder, self._routine_of = builder, routine_of

    # ---- calls and loops ------------------------------------------------------------------------
    def add_loop(self, node: Node) -> None:
        """Adds a loop step for a call or loop node; a call is a loop of one iteration."""
        (region,) = node.regions
        scalar_inputs = self._scalar_inputs(node, region)
        zeros = self._zero_inputs(node, region)
        args = {i: self._argument_register(node, region, i, i in scalar_inputs)
                for i in range(len(region.inputs)) if i not in zeros}  # fmt: skip
        self._builder.close_segment()
        done = 0
        outs: Sequence[Register | None] = ()
        if zeros:  # the first iteration is peeled: what is added to zeros need only be stored
            done, outs = 1, self._add_iterations(node, region, args, scalar_inputs, zeros, range(1))
        if region.count > done:
            outs = self._add_iterations(
                node, region, args, scalar_inputs, (), range(done, region.count)
            )
        for position, out in zip(region.outputs, outs, strict=True):
            if position is not None and out is not None:
                self._builder.bind(node.outputs[position], out)

    def _add_iterations(
        self,
        node: Node,
        region: Region[FunctionalGraph],
        args: dict[int, Register],
        scalar_inputs: frozenset[int],
        zeros: Sequence[int],
        iterations: range,
    ) -> list[Register | None]:
        """Adds a loop step for a range of the iterations of a call or loop `node`.

        Args:
            args: argument registers by input; updated to those of the next iteration.
            zeros: inputs that are zeros.

        Returns:
            Where the outputs are that somebody wants: those that the graph passes on, where the
            caller has them.
        """
        graph, registers = region.graph, self._builder.registers
        inputs = [i for i in range(len(graph.inputs)) if i not in zeros]
        arrays = [k for k, i in region.carried if i not in scalar_inputs]
        routine = self._routine_of(graph, scalar_inputs, arrays, zeros)
        carried = {i: k for k, i in region.carried if i in args}

        def output_register(output_index: int) -> tuple[Register | None, Register | None]:
            """Returns where a node's output is stored, and the register that receives it."""
            register = routine.outputs[output_index]
            if region.outputs[output_index] is None:
                return None, None
            if register in routine.inputs:
                i = inputs[routine.inputs.index(register)]
                if len(iterations) == 1 or carried.get(i, output_index) == output_index:
                    return args[i], None
            new = (
                registers.new_array(routine.specs[register])
                if register in routine.specs
                else registers.new_scalar()
            )
            return new, new

        places = [output_register(k) for k in range(len(routine.outputs))]
        per_iteration = graph.num_stochastic_roundings
        step = Loop(
            body=CallArgs(
                routine=routine,
                args=tuple(args[i] for i in inputs),
                outs=tuple(own for _, own in places),
            ),
            count=len(iterations),
            carried=tuple((k, inputs.index(i)) for k, i in region.carried if i in inputs),
            rounding_offset=(
                self._builder.rounding_offset + iterations.start * per_iteration,
                per_iteration,
            ),
        )
        self._builder.add_step(step, node)
        outputs = [register for register, _ in places]
        for k, i in region.carried:
            register = outputs[k]
            assert register is not None
            args[i] = register
        return outputs

    def _zero_inputs(self, node: Node, region: Region[FunctionalGraph]) -> tuple[int, ...]:
        """Returns the inputs modified by a loop that are zeros before its first iteration."""
        changed = {i for k, i in region.carried if k >= len(region.graph.graph._outputs)}
        return tuple(
            i
            for i in sorted(changed)
            if self._builder.is_zeros(node.inputs[region.op_input_index(i)])
        )

    def _scalar_inputs(self, node: Node, region: Region[FunctionalGraph]) -> frozenset[int]:
        """Returns the loop inputs that are integers known to the host in all iterations."""
        own = len(region.graph.graph._outputs)
        changed = {i for k, i in region.carried if k >= own}
        scalar_inputs = {
            i
            for i, position in enumerate(region.inputs)
            if position is not None
            and i not in changed
            and self._builder.scalar_register(node.inputs[position]) is not None
        }
        while region.carried:
            arrays = [k for k, i in region.carried if i not in scalar_inputs]
            routine = self._routine_of(region.graph, frozenset(scalar_inputs), arrays)
            lost = {i for k, i in region.carried
                    if i in scalar_inputs and routine.outputs[k] in routine.specs}  # fmt: skip
            if not lost:
                break
            scalar_inputs -= lost
        return frozenset(scalar_inputs)

    def _argument_register(
        self, node: Node, region: Region[FunctionalGraph], index: int, scalar_inputs: bool
    ) -> Register:
        value = node.inputs[region.op_input_index(index)]
        register = (
            self._builder.scalar_register(value)
            if scalar_inputs
            else self._builder.array_register(value)
        )
        assert register is not None
        return register

    # ---- branches -------------------------------------------------------------------------------
    def add_branch(self, node: Node) -> None:
        """Adds a branch step for a conditional node."""
        builder = self._builder
        condition = builder.scalar_register(node.inputs[0])
        if condition is None:
            condition = builder.fetch_scalar(node.inputs[0], node)
        branches = []
        for region in node.regions:
            every = range(len(region.graph.outputs))
            routine = self._routine_of(region.graph, frozenset(), every)
            args = [
                self._argument_register(node, region, i, False) for i in range(len(region.inputs))
            ]
            branches.append(CallArgs(routine=routine, args=tuple(args)))
        builder.close_segment()
        outs: list[Register | None] = []
        for k, value in enumerate(node.outputs):
            forwarded = {_forwarded_register(branch, k) for branch in branches}
            (register,) = forwarded if len(forwarded) == 1 else (None,)
            if register is None:
                new = builder.registers.new_array(value.spec)
            outs.append(new if register is None else None)
            builder.bind(value, new if register is None else register)
        step = Branch(
            condition=condition, branches=tuple(branches), outs=tuple(outs),
            rounding_offset=builder.rounding_offset,
        )  # fmt: skip
        builder.add_step(step, node)


def _forwarded_register(call_args: CallArgs, output: int) -> Register | None:
    """Returns the caller's register that a routine returns unchanged; None if the output is new."""
    routine = call_args.routine
    register = routine.outputs[output]
    return call_args.args[routine.inputs.index(register)] if register in routine.inputs else None
