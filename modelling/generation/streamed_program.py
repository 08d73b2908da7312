"""Generation program that streams weights layer by layer, for all model families.

For each position every layer's weights are loaded once, for all micro-batches of a run. The device
holds one layer and one micro-batch at a time, so a model trained by phases can generate on the same
machine. The tokens are those of the resident program (`build_resident_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

import popxl
from config.sections import RunConfig
from modelling.generation.conditional_call import any_across_replicas
from modelling.generation.generator import Generator, GeneratorFactory, create_search
from modelling.generation.greedy_search import GreedyStrategy
from modelling.generation.layer_pass import LayerPass
from modelling.generation.resident_program import GenerationProgram
from modelling.generation.search import DecodingStrategy, Search
from modelling.generation.streamed_executor import ONCE, Caches, StreamedExecutor
from modelling.generation.streamed_weights import ModelWeights
from modelling.ir_building import build_ir
from modelling.layers import LMHeadLoss
from modelling.layers.layer_wrapper import LayerWrapper
from modelling.phases.buffers import InputBuffers, loop_over_layers
from modelling.phases.settings import PhaseSettings
from modelling.weights import WeightMap
from popxl import Tensor, TensorSpec, ops
from popxl_addons import Module, NamedTensors


def build_streamed_program(
    config: RunConfig,
    make_generator: GeneratorFactory,
    weight_map: WeightMap,
    strategy: DecodingStrategy | None = None,
) -> GenerationProgram:
    """Build the generation program that loads weights from host memory, layer by layer.

    A run takes `num_streamed_batches` micro-batches on each replica.

    Args:
        config: needs `model.eval`.
        weight_map: the model's weights.
        strategy: decoding strategy; None: greedy search.
    """
    strategy = strategy or GreedyStrategy()
    config = _with_num_micro_batches(config, num_streamed_batches(config))
    with build_ir(config) as (ir, groups):
        ir.num_host_transfers = config.gradient_accumulation
        settings = PhaseSettings(config, groups, weight_map)
        generator = make_generator(config, strategy.sequences_per_prompt)
        builder = StreamedProgramBuilder(settings, generator, strategy, weight_map)
        tokens = builder.build()
        variables = builder.weights.variables
    streams = builder.inputs.streams
    search_inputs = {name: streams[name] for name in builder.search_inputs}
    return GenerationProgram(
        ir, streams["input_ids"], streams["mask"], search_inputs, tokens, variables
    )


def num_streamed_batches(config: RunConfig) -> int:
    """Number of micro-batches per data-parallel replica that use each load of a layer's weights."""
    e = config.execution
    samples = e.micro_batch_size * e.data_parallel
    configured = config.generation.micro_batches
    return configured or max(config.training.global_batch_size // samples, e.device_iterations)


def _with_num_micro_batches(config: RunConfig, count: int) -> RunConfig:
    """Return the configuration with the batch size that gives `count` micro-batches per replica.

    See `PhaseSettings.num_micro_batches`.
    """
    e = config.execution
    size = e.micro_batch_size * e.data_parallel * count
    return replace(config, training=replace(config.training, global_batch_size=size))


# ---- modules around the search ------------------------------------------------------------------
class PreparePrompts(Module):
    """Module that turns prompts into first tokens, initial search state and prompt state."""

    def __init__(self, program: StreamedProgramBuilder) -> None:
        super().__init__()
        self._program = program

    def build(self, input_ids: Tensor, mask: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        program = self._program
        is_real_prompt, first, prompt_tokens, prompt_state = program.model.prepare_prompts(
            input_ids, mask
        )
        state = program.search.init_state(is_real_prompt, prompt_tokens, inputs)
        program.needs_mask = [t is mask for t in prompt_state]
        new = [t for t in prompt_state if t is not mask]
        return program.copy_decode_state(first, _identity_beam_idx(first.shape[0]), state, new)


class ChooseTokens(LayerWrapper):
    """Module that turns the last layer's output into next tokens and a new search state."""

    layer: LMHeadLoss

    def __init__(self, program: StreamedProgramBuilder) -> None:
        super().__init__(program.model.make_head())
        self._program = program

    def build(self, x: Tensor, state: list[Tensor], position: Tensor) -> list[Tensor]:
        logits = self.layer.next_token_logits(x)
        input_ids, beam_idx, state = self._program.search.advance(logits, position, state)
        return self._program.copy_decode_state(input_ids, beam_idx, state)


class GeneratedTokens(Module):
    """Module that turns the search's final state into the generated tokens."""

    def __init__(self, search: Search) -> None:
        super().__init__()
        self._search = search

    def build(self, state: list[Tensor]) -> Tensor:
        """Read the tokens from the search's state tensors: int32 (prompts, length)."""
        return ops.identity(self._search.output_tokens(state))


def _identity_beam_idx(sequences: int) -> Tensor:
    """Beam indices with which each sequence continues itself: int32 (sequences,)."""
    return popxl.constant(np.arange(sequences), popxl.int32, "identity")


# ---- the program --------------------------------------------------------------------------------
class StreamedProgramBuilder:
    """Builds the streamed generation program in the current graph.

    Attributes:
        search_inputs: names of the search's inputs.
        needs_mask: for each tensor of `PreparedPrompts.prompt_state`: true if it is the mask.
    """

    needs_mask: list[bool]

    def __init__(
        self,
        settings: PhaseSettings,
        model: Generator,
        strategy: DecodingStrategy,
        weight_map: WeightMap,
    ) -> None:
        self.settings, self.model, self.groups = settings, model, settings.groups
        self.reorders = strategy.sequences_per_prompt > 1
        self.weights = ModelWeights(weight_map, settings)
        self.search = create_search(strategy, model, self.groups)
        batch = settings.config.execution.micro_batch_size
        prompts = TensorSpec((batch, model.prompt_length), popxl.int32)
        self.count = batch * model.prompts_per_sample
        search_inputs = strategy.input_specs(self.count, model.output_length)
        self.search_inputs = list(search_inputs)
        specs = {"input_ids": prompts, "mask": prompts, **search_inputs}
        self.inputs = InputBuffers(specs, settings)

    def copy_decode_state(
        self,
        input_ids: Tensor,
        beam_idx: Tensor | None,
        state: Sequence[Tensor],
        prompt_state: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Return copies of a micro-batch's decoding state and prompt state, to be stored.

        They are distinct tensors, since each is stored in a buffer of its own.
        """
        unfinished = any_across_replicas(self.search.unfinished_prompts(list(state)), self.groups)
        first = [input_ids, unfinished]
        if self.reorders:
            assert beam_idx is not None
            first.append(beam_idx)
        return [ops.identity(t) for t in (*first, *state, *prompt_state)]

    def build(self) -> popxl.DeviceToHostStream:
        """Add the whole generation program to the current graph; returns its output stream."""
        tokens = popxl.d2h_stream((self.count, self.model.output_length), popxl.int32, "tokens")
        row, no_weights = popxl.constant(0, popxl.int32), NamedTensors()
        self.inputs.load_from_host()
        self._start_search(row, no_weights)
        caches, loop_invariants = self.model.prefill(
            StreamedExecutor(self.weights, self.settings, "prompt"),
            self.inputs.layer_io("input_ids"),
            self._prompt_state,
        )
        self._generate_all_positions(caches, loop_invariants)
        end = LayerPass(GeneratedTokens(self.search), [self._state], self.settings)
        with popxl.plan.part("search/end"):
            end.run_layer(row, no_weights)
            self._loop_over_micro_batches(
                lambda step: ops.host_store(tokens, end.outputs[0].load_first_row(step))
            )
        return tokens

    def _start_search(self, row: Tensor, no_weights: NamedTensors) -> None:
        """Turn the prompts of all micro-batches into first tokens and initial search states."""
        layer_io = self.inputs.layer_io
        search_inputs = [layer_io(name) for name in self.search_inputs]
        prepare = LayerPass(
            PreparePrompts(self),
            [layer_io("input_ids"), layer_io("mask"), search_inputs],
            self.settings,
        )
        with popxl.plan.part("search/prompt"):
            prepare.run_layer(row, no_weights)
        num_new = self.needs_mask.count(False)
        self._carried = prepare.outputs[: len(prepare.outputs) - num_new]
        new = iter(prepare.outputs[len(self._carried) :])
        self._prompt_state = [
            layer_io("mask") if is_mask else next(new) for is_mask in self.needs_mask
        ]
        self._input_ids, self._unfinished, *state = self._carried
        self._beam_idx, self._state = (state[:1], state[1:]) if self.reorders else ([], state)

    def _generate_one_position(
        self, position: Tensor, caches: Caches, loop_invariants: list[Tensor]
    ) -> Tensor:
        """Generate one token of each sequence; returns the flag of `_any_unfinished`."""
        settings = self.settings
        executor = StreamedExecutor(self.weights, settings, "token", self._beam_idx)
        x, _ = self.model.decode(
            executor, self._input_ids, position, caches, self._prompt_state, loop_invariants
        )
        choose = LayerPass(
            ChooseTokens(self), [x, self._state], settings, [position.spec], self._carried
        )
        with popxl.plan.part("head/token"):
            self.weights.run_stack("head", [choose], ONCE, position)
        return self._any_unfinished()

    def _generate_all_positions(self, caches: Caches, loop_invariants: list[Tensor]) -> None:
        """Loop over positions until all prompts are finished; then skip the remaining ones."""
        ir = popxl.gir()

        def generate_position(position: Tensor, loop_invariants: list[Tensor]) -> Tensor:
            return self._generate_one_position(position, caches, loop_invariants)

        def skip_position(position: Tensor, loop_invariants: list[Tensor]) -> Tensor:
            return popxl.constant(0, popxl.int32)

        def loop_body(
            position: Tensor, unfinished: Tensor, loop_invariants: list[Tensor]
        ) -> list[Tensor]:
            skip = ir.create_graph(skip_position, position, loop_invariants)
            generate = ir.create_graph(generate_position, position, loop_invariants)
            done = ops.logical_not(ops.cast(unfinished, popxl.bool))
            inputs = [position, *loop_invariants]
            # Plans do not know the condition and take it for false, so the work is in that branch.
            (unfinished,) = ops.conditional(done, skip, generate, inputs, inputs)
            return [position + 1, unfinished]

        first, unfinished = popxl.constant(0, popxl.int32), self._any_unfinished()
        loop = ir.create_graph(loop_body, first, unfinished, loop_invariants)
        ops.repeat(loop, self.model.output_length, first, unfinished, *loop_invariants)

    def _any_unfinished(self) -> Tensor:
        """Flag that is 1 while a prompt of any micro-batch needs more tokens: int32 scalar."""

        def add_unfinished(step: Tensor, total: Tensor) -> list[Tensor]:
            unfinished = self._unfinished.load_first_row(step)
            return [step + 1, ops.maximum(total, ops.cast(unfinished, popxl.int32))]

        zero = popxl.constant(0, popxl.int32)
        with popxl.plan.part("search/token"):
            total = popxl.constant(0, popxl.int32)
            graph = popxl.gir().create_graph(add_unfinished, zero, total)
            return ops.repeat(graph, self.settings.num_micro_batches, zero, total)[1]

    def _loop_over_micro_batches(self, body: Callable[[Tensor], object]) -> None:
        def run_micro_batch(step: Tensor) -> list[Tensor]:
            body(step)
            return []

        loop_over_layers(range(self.settings.num_micro_batches), run_micro_batch)
