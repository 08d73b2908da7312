"""Generation that streams its output: each program run generates one token and keeps its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import popxl
from config.sections import RunConfig
from modelling.generation.conditional_call import any_across_replicas
from modelling.generation.decode_loop import continue_decoding
from modelling.generation.generator import GeneratorFactory, create_search
from modelling.generation.resident_executor import ResidentModel
from modelling.generation.resident_program import GenerationProgram, create_streams_and_variables
from modelling.generation.search import DecodingStrategy, Search
from modelling.ir_building import build_ir
from modelling.layers import ParallelGroups
from popxl import Tensor, ops
from popxl_addons import NamedTensors


def build_token_by_token_program(
    config: RunConfig, make_generator: GeneratorFactory, strategy: DecodingStrategy
) -> GenerationProgram:
    """Build a one-micro-batch program with resident weights that generates one token per run.

    A run reads the prompts first if `starts_stream` is true. Variables hold the state between runs.
    """
    with build_ir(config) as (ir, groups):
        generator = make_generator(config, strategy.sequences_per_prompt)
        model = ResidentModel(generator, config.execution.micro_batch_size, groups)
        search = create_search(strategy, generator, groups)
        program = create_streams_and_variables(
            ir, generator, config.execution.micro_batch_size, strategy, model
        )
        starts = popxl.h2d_stream((program.input_ids.shape[0],), popxl.bool, "starts")
        unfinished_stream = popxl.d2h_stream((), popxl.bool, "unfinished")
        names, weights = program.variables.unpack()  # type: ignore[union-attr]
        inputs = [
            ops.host_load(s) for s in (program.input_ids, program.mask, *program.inputs.values())
        ]
        step = TokenStep(model, search, groups, names)
        start = ir.create_graph(step.start_decoding, weights, inputs)
        state = [_create_state_variable(ir, t) for t in start.outputs]
        resume = ir.create_graph(lambda state: state, state)
        current = ops.conditional(
            any_across_replicas(ops.host_load(starts), groups),
            start,
            resume,
            [*weights, *inputs],
            state,
        )
        new = step.decode_token(weights, current)
        for variable, t in zip(state, new, strict=True):
            ops.var_updates.copy_var_update_(variable, t)
        ops.host_store(program.tokens, search.output_tokens(list(new[3 : 3 + step.num_states])))
        ops.host_store(unfinished_stream, new[1])
    return replace(program, starts_stream=starts, unfinished_stream=unfinished_stream)


class TokenStep:
    """The graphs of one run: prefill of the prompt, or one decoding step.

    The state between runs: position, a flag that is true if a prompt needs more tokens, the tokens
    to read, the search's state, the caches, and the decoder's constant inputs.
    """

    def __init__(
        self, model: ResidentModel, search: Search, groups: ParallelGroups, names: Sequence[str]
    ) -> None:
        self._model, self._search, self._groups, self._names = model, search, groups, names
        self.num_states = 0
        self._num_caches = 0

    def start_decoding(self, weights: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """Prefill the KV caches from the prompts; returns the initial decoding state."""
        input_ids, mask, *search_inputs = inputs
        prefilled = self._model.run_prefill(self._name_weights(weights), input_ids, mask)
        state = self._search.init_state(
            prefilled.prompts.is_real_prompt, prefilled.prompts.prompt_tokens, search_inputs
        )
        self.num_states, self._num_caches = len(state), len(prefilled.caches)
        unfinished = any_across_replicas(self._search.unfinished_prompts(state), self._groups)
        first = popxl.constant(0, popxl.int32, "first_position")
        return [
            first,
            unfinished,
            prefilled.prompts.first_tokens,
            *state,
            *prefilled.caches,
            *prefilled.decode_inputs,
        ]

    def decode_token(self, weights: list[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """Generate one token of each sequence; returns the new decoding state."""
        end = 3 + self.num_states + self._num_caches  # of the part that changes
        decode = self._model.bind_decode(self._name_weights(weights), state[end:])
        new = continue_decoding(
            decode, state[0], state[1:end], self.num_states, 1, self._search, self._groups
        )
        return [*new[:end], *state[end:]]

    def _name_weights(self, weights: list[Tensor]) -> NamedTensors:
        return NamedTensors.pack(self._names, weights)


def _create_state_variable(ir: popxl.Ir, t: Tensor) -> Tensor:
    """Create a zero-initialized variable per replica with a tensor's shape and dtype."""
    grouping = ir.replica_grouping(group_size=1)
    shape = t.shape if grouping.num_groups == 1 else (grouping.num_groups, *t.shape)
    return popxl.variable(
        np.zeros(shape, t.dtype.as_numpy()), t.dtype, "state", replica_grouping=grouping
    )
