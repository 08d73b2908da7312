"""The program that generates layer by layer: the same for all families.

For each position every layer's weights pass the device once, over all micro-batches of a run. The
device holds one layer and one micro-batch at a time; so a model that was trained by phases can
write on the same machine. The tokens are those of the resident program (`build_resident`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

import popxl
from config.sections import RunConfig
from modelling.building import build_ir
from modelling.generation.conditional_call import any_prompt
from modelling.generation.generator import Generator, GeneratorFactory
from modelling.generation.greedy_search import Greedy
from modelling.generation.layer_pass import LayerPass, ModelWeights
from modelling.generation.resident_program import GenerationProgram
from modelling.generation.search import DecodingStrategy, Search, SearchContext
from modelling.generation.streamed_executor import ONCE, Caches, StreamedExecutor
from modelling.layers import LMHeadLoss
from modelling.layers.wrapped import LayerWrapper
from modelling.phases.buffers import InputBuffers, loop_over_layers
from modelling.phases.settings import PhaseSettings
from modelling.weights import WeightMap
from popxl import Tensor, TensorSpec, ops
from popxl_addons import Module, NamedTensors


def build_streamed(
    config: RunConfig,
    make_generator: GeneratorFactory,
    weight_map: WeightMap,
    strategy: DecodingStrategy | None = None,
) -> GenerationProgram:
    """Build the program of a configuration, whose `model.eval` must be set.

    A run takes `num_streamed_batches` micro-batches on each replica.

    Args:
        table: the model's weights.
        strategy: how to search; None: greedily.
    """
    strategy = strategy or Greedy()
    config = _with_batches(config, num_streamed_batches(config))
    with build_ir(config) as (ir, groups):
        ir.num_host_transfers = config.gradient_accumulation
        settings = PhaseSettings(config, groups, weight_map)
        generator = make_generator(config, strategy.sequences)
        program = StreamedProgramBuilder(settings, generator, strategy, weight_map)
        tokens = program.run()
        variables = program.weights.variables
    streams = program.inputs.streams
    searched = {name: streams[name] for name in program.searched}
    return GenerationProgram(ir, streams["input_ids"], streams["mask"], searched, tokens, variables)


def num_streamed_batches(config: RunConfig) -> int:
    """Micro-batches of each data-parallel copy that a pass of the weights serves."""
    e = config.execution
    at_once = e.micro_batch_size * e.data_parallel
    wanted = config.generation.micro_batches
    return wanted or max(config.training.global_batch_size // at_once, e.device_iterations)


def _with_batches(config: RunConfig, count: int) -> RunConfig:
    """The configuration whose `PhaseSettings.micro_batches` are `count`."""
    e = config.execution
    size = e.micro_batch_size * e.data_parallel * count
    return replace(config, training=replace(config.training, global_batch_size=size))


# ---- modules around the search ------------------------------------------------------------------
class PreparePrompts(Module):
    """From prompts to the first words, what the family needs, and what the search begins with."""

    def __init__(self, program: StreamedProgramBuilder) -> None:
        super().__init__()
        self._program = program

    def build(self, input_ids: Tensor, mask: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        program = self._program
        has_prompt, first, read, prompt_state = program.model.prepare_prompts(input_ids, mask)
        state = program.search.start(has_prompt, read, inputs)
        program.needs_mask = [t is mask for t in prompt_state]
        new = [t for t in prompt_state if t is not mask]
        return program.outputs(first, _identity_beam_idx(first.shape[0]), state, new)


class ChooseTokens(LayerWrapper):
    """From the last layer's output to the next words, with what the search makes of them."""

    layer: LMHeadLoss

    def __init__(self, program: StreamedProgramBuilder) -> None:
        super().__init__(program.model.head())
        self._program = program

    def build(self, x: Tensor, state: list[Tensor], position: Tensor) -> list[Tensor]:
        logits = self.layer.next_token_logits(x)
        input_ids, beam_idx, state = self._program.search.advance(logits, position, state)
        return self._program.outputs(input_ids, beam_idx, state)


class GeneratedTokens(Module):
    """What the search has found."""

    def __init__(self, search: Search) -> None:
        super().__init__()
        self._search = search

    def build(self, state: list[Tensor]) -> Tensor:
        """-> int32 (prompts, length)."""
        return ops.identity(self._search.tokens(state))


def _identity_beam_idx(sequences: int) -> Tensor:
    """Each sequence's own number: int32 (sequences,)."""
    return popxl.constant(np.arange(sequences), popxl.int32, "itself")


# ---- the program --------------------------------------------------------------------------------
class StreamedProgramBuilder:
    """A streamed program under construction, in the current graph.

    Attributes:
        searched: names of the streams of the search's inputs.
        needs_mask: which of `Prompts.prompt_state` are the mask.
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
        self.reorders = strategy.sequences > 1
        self.weights = ModelWeights(weight_map.phases, settings)
        context = SearchContext(
            self.groups, model.special_tokens, model.output_length, strategy.processors
        )
        self.search = strategy.search(context)
        batch = settings.config.execution.micro_batch_size
        prompts = TensorSpec((batch, model.prompt_length), popxl.int32)
        self.count = batch * model.prompts_per_sample
        needed = strategy.inputs(self.count, model.output_length)
        self.searched = list(needed)
        self.inputs = InputBuffers({"input_ids": prompts, "mask": prompts, **needed}, settings)

    def outputs(
        self,
        input_ids: Tensor,
        beam_idx: Tensor | None,
        state: Sequence[Tensor],
        prompt_state: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Return copies of a micro-batch's state between positions and of `prompt_state`.

        They are distinct tensors, since each is stored in a buffer of its own.
        """
        unfinished = any_prompt(self.search.unfinished(list(state)), self.groups)
        first = [input_ids, unfinished]
        if self.reorders:
            assert beam_idx is not None
            first.append(beam_idx)
        return [ops.identity(t) for t in (*first, *state, *prompt_state)]

    def run(self) -> popxl.DeviceToHostStream:
        """Add the whole program; gives the stream of the tokens."""
        tokens = popxl.d2h_stream((self.count, self.model.output_length), popxl.int32, "tokens")
        only, nothing = popxl.constant(0, popxl.int32), NamedTensors()
        self.inputs.load()
        self._begin(only, nothing)
        caches, loop_invariants = self.model.prefill(
            StreamedExecutor(self.weights, self.settings, "prompt"),
            self.inputs.layer_io("input_ids"),
            self._prompt_state,
        )
        self._all_positions(caches, loop_invariants)
        end = LayerPass(GeneratedTokens(self.search), [self._state], self.settings)
        with popxl.plan.part("search/end"):
            end.call(only, nothing)
            self._over_batches(lambda step: ops.host_store(tokens, end.outputs[0].load(step)))
        return tokens

    def _begin(self, only: Tensor, nothing: NamedTensors) -> None:
        """Begin the search with all micro-batches."""
        ports = self.inputs.layer_io
        searched = [ports(name) for name in self.searched]
        begin = LayerPass(
            PreparePrompts(self), [ports("input_ids"), ports("mask"), searched], self.settings
        )
        with popxl.plan.part("search/prompt"):
            begin.call(only, nothing)
        new = self.needs_mask.count(False)
        self._carried = begin.outputs[: len(begin.outputs) - new]
        new_ports = iter(begin.outputs[len(self._carried) :])
        self._prompt_state = [
            ports("mask") if mask else next(new_ports) for mask in self.needs_mask
        ]
        self._words, self._unfinished, *left = self._carried
        self._parents, self._state = (left[:1], left[1:]) if self.reorders else ([], left)

    def _one_position(
        self, position: Tensor, caches: Caches, loop_invariants: list[Tensor]
    ) -> Tensor:
        """Write a token of each sequence; whether any prompt needs more, see `_any_unfinished`."""
        settings = self.settings
        executor = StreamedExecutor(self.weights, settings, "token", self._parents)
        x, _ = self.model.decode(
            executor, self._words, position, caches, self._prompt_state, loop_invariants
        )
        choose = LayerPass(
            ChooseTokens(self), [x, self._state], settings, [position.spec], self._carried
        )
        with popxl.plan.part("head/token"):
            self.weights.run("head", [choose], ONCE, position)
        return self._any_unfinished()

    def _all_positions(self, caches: Caches, loop_invariants: list[Tensor]) -> None:
        """Write tokens until every prompt is answered; the remaining positions cost nothing."""
        ir = popxl.gir()

        def advance(position: Tensor, loop_invariants: list[Tensor]) -> Tensor:
            return self._one_position(position, caches, loop_invariants)

        def finished(position: Tensor, loop_invariants: list[Tensor]) -> Tensor:
            return popxl.constant(0, popxl.int32)

        def one_position(
            position: Tensor, unfinished: Tensor, loop_invariants: list[Tensor]
        ) -> list[Tensor]:
            nothing = ir.create_graph(finished, position, loop_invariants)
            going = ir.create_graph(advance, position, loop_invariants)
            done = ops.logical_not(ops.cast(unfinished, popxl.bool))
            given = [position, *loop_invariants]
            # In this order: plans, which do not know the condition, take it for false.
            (left,) = ops.conditional(done, nothing, going, given, given)
            return [position + 1, left]

        first, unfinished = popxl.constant(0, popxl.int32), self._any_unfinished()
        loop = ir.create_graph(one_position, first, unfinished, loop_invariants)
        ops.repeat(loop, self.model.output_length, first, unfinished, *loop_invariants)

    def _any_unfinished(self) -> Tensor:
        """Whether any micro-batch has a prompt that needs more tokens: int32 scalar, 0 if not."""

        def add(step: Tensor, any_so_far: Tensor) -> list[Tensor]:
            one = self._unfinished.load(step)
            return [step + 1, ops.maximum(any_so_far, ops.cast(one, popxl.int32))]

        zero = popxl.constant(0, popxl.int32)
        with popxl.plan.part("search/token"):
            any_so_far = popxl.constant(0, popxl.int32)
            graph = popxl.gir().create_graph(add, zero, any_so_far)
            return ops.repeat(graph, self.settings.micro_batches, zero, any_so_far)[1]

    def _over_batches(self, body: Callable[[Tensor], object]) -> None:
        def one(step: Tensor) -> list[Tensor]:
            body(step)
            return []

        loop_over_layers(range(self.settings.micro_batches), one)
