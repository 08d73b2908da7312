"""Generation token by token: each run of the program goes on where the last one stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import popxl
from config.sections import RunConfig
from modelling.building import build_ir
from modelling.generation.conditional_call import any_prompt
from modelling.generation.decode_loop import decode_more
from modelling.generation.generator import GeneratorFactory
from modelling.generation.resident_executor import ResidentModel
from modelling.generation.resident_program import GenerationProgram, declare_program
from modelling.generation.search import DecodingStrategy, Search, SearchContext
from modelling.layers import ParallelGroups
from popxl import Tensor, ops
from popxl_addons import NamedTensors


def build_token_by_token(
    config: RunConfig, make_generator: GeneratorFactory, strategy: DecodingStrategy
) -> GenerationProgram:
    """Like `build_resident`, for one micro-batch, of which a run reads the prompts, if `begin`
    says so, and writes one token more. What is known between runs is in variables."""
    with build_ir(config) as (ir, groups):
        generator = make_generator(config, strategy.sequences)
        model = ResidentModel(generator, config.execution.micro_batch_size, groups)
        length = generator.output_length
        search = strategy.search(
            SearchContext(groups, generator.special_tokens, length, strategy.processors)
        )
        program = declare_program(ir, generator, config.execution.micro_batch_size, strategy, model)
        starts = popxl.h2d_stream((program.input_ids.shape[0],), popxl.bool, "begin")
        unfinished_stream = popxl.d2h_stream((), popxl.bool, "going")
        names, values = program.variables.unpack()  # type: ignore[union-attr]
        read = [
            ops.host_load(s) for s in (program.input_ids, program.mask, *program.inputs.values())
        ]
        run = TokenStep(model, search, groups, names)
        fresh = ir.create_graph(run.begin, values, read)
        state = [_state_variable(ir, t) for t in fresh.outputs]
        same = ir.create_graph(lambda kept: kept, state)
        now = ops.conditional(
            any_prompt(ops.host_load(starts), groups), fresh, same, [*values, *read], state
        )
        new = run.advance(values, now)
        for kept, t in zip(state, new, strict=True):
            ops.var_updates.copy_var_update_(kept, t)
        ops.host_store(program.tokens, search.tokens(list(new[3 : 3 + run.states])))
        ops.host_store(unfinished_stream, new[1])
    return replace(program, starts_stream=starts, unfinished_stream=unfinished_stream)


class TokenStep:
    """One run; its methods add to the current graph.

    What it keeps: position, whether a prompt needs tokens, the tokens to read, the search's state,
    the caches, and what the decoder is given besides.
    """

    def __init__(
        self, model: ResidentModel, search: Search, groups: ParallelGroups, names: Sequence[str]
    ) -> None:
        self._model, self._search, self._groups, self._names = model, search, groups, names
        self.states = 0
        self._caches = 0

    def begin(self, values: list[Tensor], read: list[Tensor]) -> list[Tensor]:
        """What there is before the first token."""
        input_ids, mask, *inputs = read
        prefilled = self._model.read_prompts(self._weights(values), input_ids, mask)
        state = self._search.start(
            prefilled.prompts.has_prompt, prefilled.prompts.prompt_tokens, inputs
        )
        self.states, self._caches = len(state), len(prefilled.caches)
        running = any_prompt(self._search.unfinished(state), self._groups)
        first = popxl.constant(0, popxl.int32, "first_position")
        return [
            first,
            running,
            prefilled.prompts.first_tokens,
            *state,
            *prefilled.caches,
            *prefilled.decode_inputs,
        ]

    def advance(self, values: list[Tensor], now: Sequence[Tensor]) -> list[Tensor]:
        """The same after one token more."""
        carried = 3 + self.states + self._caches
        decode = self._model.bound(self._weights(values), now[carried:])
        changed = decode_more(
            decode, now[0], now[1:carried], self.states, 1, self._search, self._groups
        )
        return [*changed[:carried], *now[carried:]]

    def _weights(self, values: list[Tensor]) -> NamedTensors:
        return NamedTensors.pack(self._names, values)


def _state_variable(ir: popxl.Ir, t: Tensor) -> Tensor:
    """A variable like a tensor, of each replica its own."""
    each = ir.replica_grouping(group_size=1)
    shape = t.shape if each.num_groups == 1 else (each.num_groups, *t.shape)
    return popxl.variable(
        np.zeros(shape, t.dtype.as_numpy()), t.dtype, "kept", replica_grouping=each
    )
