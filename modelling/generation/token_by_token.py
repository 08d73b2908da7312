"""Generation token by token: each run of the program goes on where the last one stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import popxl
from config.sections import RunConfig
from modelling.building import building
from modelling.generation.conditional_call import is_any
from modelling.generation.decode_loop import go_on
from modelling.generation.generator import GeneratorOf
from modelling.generation.resident_executor import ResidentModel
from modelling.generation.resident_program import GenerationProgram, declared
from modelling.generation.search import Search, SearchContext, Strategy
from modelling.layers import Groups
from popxl import Tensor, ops
from popxl_addons import NamedTensors


def build_piecewise(
    config: RunConfig, generator_of: GeneratorOf, strategy: Strategy
) -> GenerationProgram:
    """Like `build_generation`, for one micro-batch, of which a run reads the prompts, if `begin`
    says so, and writes one token more. What is known between runs is in variables."""
    with building(config) as (ir, groups):
        generator = generator_of(config, strategy.sequences)
        model = ResidentModel(generator, config.execution.micro_batch_size, groups)
        length = generator.output_length
        search = strategy.search(SearchContext(groups, generator.special, length, strategy.rules))
        program = declared(ir, generator, config.execution.micro_batch_size, strategy, model)
        begin = popxl.h2d_stream((program.input_ids.shape[0],), popxl.bool, "begin")
        going = popxl.d2h_stream((), popxl.bool, "going")
        names, values = program.variables.unpack()  # type: ignore[union-attr]
        read = [
            ops.host_load(s) for s in (program.input_ids, program.mask, *program.inputs.values())
        ]
        run = _Run(model, search, groups, names)
        fresh = ir.create_graph(run.begin, values, read)
        state = [_kept(ir, t) for t in fresh.outputs]
        same = ir.create_graph(lambda kept: kept, state)
        now = ops.conditional(
            is_any(ops.host_load(begin), groups), fresh, same, [*values, *read], state
        )
        new = run.advance(values, now)
        for kept, t in zip(state, new, strict=True):
            ops.var_updates.copy_var_update_(kept, t)
        ops.host_store(program.tokens, search.tokens(list(new[3 : 3 + run.states])))
        ops.host_store(going, new[1])
    return replace(program, begin=begin, going=going)


class _Run:
    """One run; its methods add to the current graph.

    What it keeps: position, whether a prompt needs tokens, the tokens to read, the search's state,
    the caches, and what the decoder is given besides.
    """

    def __init__(
        self, model: ResidentModel, search: Search, groups: Groups, names: Sequence[str]
    ) -> None:
        self._model, self._search, self._groups, self._names = model, search, groups, names
        self.states = 0
        self._caches = 0

    def begin(self, values: list[Tensor], read: list[Tensor]) -> list[Tensor]:
        """What there is before the first token."""
        input_ids, mask, *inputs = read
        begun = self._model.begin(self._weights(values), input_ids, mask)
        state = self._search.start(begun.prompts.prompted, begun.prompts.read, inputs)
        self.states, self._caches = len(state), len(begun.caches)
        running = is_any(self._search.unfinished(state), self._groups)
        first = popxl.constant(0, popxl.int32, "first_position")
        return [first, running, begun.prompts.first, *state, *begun.caches, *begun.given]

    def advance(self, values: list[Tensor], now: Sequence[Tensor]) -> list[Tensor]:
        """The same after one token more."""
        carried = 3 + self.states + self._caches
        decode = self._model.bound(self._weights(values), now[carried:])
        changed = go_on(decode, now[0], now[1:carried], self.states, 1, self._search, self._groups)
        return [*changed[:carried], *now[carried:]]

    def _weights(self, values: list[Tensor]) -> NamedTensors:
        return NamedTensors.pack(self._names, values)


def _kept(ir: popxl.Ir, t: Tensor) -> Tensor:
    """A variable like a tensor, of each replica its own."""
    each = ir.replica_grouping(group_size=1)
    shape = t.shape if each.num_groups == 1 else (each.num_groups, *t.shape)
    return popxl.variable(
        np.zeros(shape, t.dtype.as_numpy()), t.dtype, "kept", replica_grouping=each
    )
