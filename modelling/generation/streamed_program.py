"""The program that generates layer by layer: the same for all families.

For each position every layer's weights pass the device once, over all micro-batches of a run. The
device holds one layer and one micro-batch at a time; so a model that was trained by phases can
write on the same machine. The tokens are those of the resident program (`build_generation`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

import popxl
from config.sections import RunConfig
from modelling.building import building
from modelling.generation.conditional_call import is_any
from modelling.generation.generator import Generator, GeneratorOf
from modelling.generation.greedy_search import Greedy
from modelling.generation.layer_pass import ModelWeights, Pass
from modelling.generation.resident_program import GenerationProgram
from modelling.generation.search import Search, SearchContext, Strategy
from modelling.generation.streamed_executor import ONCE, Caches, StreamedExecutor
from modelling.layers import LMHeadLoss
from modelling.layers.wrapped import Wrapped
from modelling.phases.buffers import InputBuffers, loop_over_layers
from modelling.phases.settings import PhaseSettings
from modelling.weights import WeightMap
from popxl import Tensor, TensorSpec, ops
from popxl_addons import Module, NamedTensors


def build_streamed(
    config: RunConfig,
    generator_of: GeneratorOf,
    weight_map: WeightMap,
    strategy: Strategy | None = None,
) -> GenerationProgram:
    """Build the program of a configuration, whose `model.eval` must be set.

    A run takes `streamed_batches` micro-batches on each replica.

    Args:
        table: the model's weights.
        strategy: how to search; None: greedily.
    """
    strategy = strategy or Greedy()
    config = _with_batches(config, streamed_batches(config))
    with building(config) as (ir, groups):
        ir.num_host_transfers = config.gradient_accumulation
        settings = PhaseSettings(config, groups, weight_map)
        generator = generator_of(config, strategy.sequences)
        program = _Program(settings, generator, strategy, weight_map)
        tokens = program.run()
        variables = program.weights.variables
    streams = program.inputs.streams
    searched = {name: streams[name] for name in program.searched}
    return GenerationProgram(ir, streams["input_ids"], streams["mask"], searched, tokens, variables)


def streamed_batches(config: RunConfig) -> int:
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
class _Begin(Module):
    """From prompts to the first words, what the family needs, and what the search begins with."""

    def __init__(self, program: _Program) -> None:
        super().__init__()
        self._program = program

    def build(self, input_ids: Tensor, mask: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        program = self._program
        prompted, first, read, about = program.model.begin(input_ids, mask)
        state = program.search.start(prompted, read, inputs)
        program.needs_mask = [t is mask for t in about]
        new = [t for t in about if t is not mask]
        return program.outputs(first, _itself(first.shape[0]), state, new)


class _Choose(Wrapped):
    """From the last layer's output to the next words, with what the search makes of them."""

    layer: LMHeadLoss

    def __init__(self, program: _Program) -> None:
        super().__init__(program.model.head())
        self._program = program

    def build(self, x: Tensor, state: list[Tensor], position: Tensor) -> list[Tensor]:
        logits = self.layer.next_logits(x)
        input_ids, parents, state = self._program.search.advance(logits, position, state)
        return self._program.outputs(input_ids, parents, state)


class _Tokens(Module):
    """What the search has found."""

    def __init__(self, search: Search) -> None:
        super().__init__()
        self._search = search

    def build(self, state: list[Tensor]) -> Tensor:
        """-> int32 (prompts, length)."""
        return ops.identity(self._search.tokens(state))


def _itself(sequences: int) -> Tensor:
    """Each sequence's own number: int32 (sequences,)."""
    return popxl.constant(np.arange(sequences), popxl.int32, "itself")


# ---- the program --------------------------------------------------------------------------------
class _Program:
    """A streamed program under construction, in the current graph.

    Attributes:
        searched: names of the streams of the search's inputs.
        needs_mask: which of `Prompts.about` are the mask.
    """

    needs_mask: list[bool]

    def __init__(
        self, settings: PhaseSettings, model: Generator, strategy: Strategy, weight_map: WeightMap
    ) -> None:
        self.settings, self.model, self.groups = settings, model, settings.groups
        self.reorders = strategy.sequences > 1
        self.weights = ModelWeights(weight_map.phases, settings)
        context = SearchContext(self.groups, model.special, model.output_length, strategy.rules)
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
        parents: Tensor | None,
        state: Sequence[Tensor],
        about: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """A micro-batch's state between positions, and `about`, as distinct tensors, since each is
        stored in a buffer of its own."""
        going_on = is_any(self.search.unfinished(list(state)), self.groups)
        first = [input_ids, going_on]
        if self.reorders:
            assert parents is not None
            first.append(parents)
        return [ops.identity(t) for t in (*first, *state, *about)]

    def run(self) -> popxl.DeviceToHostStream:
        """Add the whole program; gives the stream of the tokens."""
        tokens = popxl.d2h_stream((self.count, self.model.output_length), popxl.int32, "tokens")
        only, nothing = popxl.constant(0, popxl.int32), NamedTensors()
        self.inputs.load()
        self._begin(only, nothing)
        caches, same = self.model.prefill(
            StreamedExecutor(self.weights, self.settings, "prompt"),
            self.inputs.layer_io("input_ids"),
            self._about,
        )
        self._all_positions(caches, same)
        end = Pass(_Tokens(self.search), [self._state], self.settings)
        with popxl.plan.part("search/end"):
            end.call(only, nothing)
            self._over_batches(lambda step: ops.host_store(tokens, end.outputs[0].load(step)))
        return tokens

    def _begin(self, only: Tensor, nothing: NamedTensors) -> None:
        """Begin the search with all micro-batches."""
        ports = self.inputs.port
        searched = [ports(name) for name in self.searched]
        begin = Pass(_Begin(self), [ports("input_ids"), ports("mask"), searched], self.settings)
        with popxl.plan.part("search/prompt"):
            begin.call(only, nothing)
        new = self.needs_mask.count(False)
        self._carried = begin.outputs[: len(begin.outputs) - new]
        new_ports = iter(begin.outputs[len(self._carried) :])
        self._about = [ports("mask") if mask else next(new_ports) for mask in self.needs_mask]
        self._words, self._going_on, *left = self._carried
        self._parents, self._state = (left[:1], left[1:]) if self.reorders else ([], left)

    def _one_position(self, position: Tensor, caches: Caches, same: list[Tensor]) -> Tensor:
        """Write a token of each sequence; whether any prompt needs more, see `_any_going_on`."""
        settings = self.settings
        executor = StreamedExecutor(self.weights, settings, "token", self._parents)
        x, _ = self.model.decode(executor, self._words, position, caches, self._about, same)
        choose = Pass(_Choose(self), [x, self._state], settings, [position.spec], self._carried)
        with popxl.plan.part("head/token"):
            self.weights.run("head", [choose], ONCE, position)
        return self._any_going_on()

    def _all_positions(self, caches: Caches, same: list[Tensor]) -> None:
        """Write tokens until every prompt is answered; the remaining positions cost nothing."""
        ir = popxl.gir()

        def advance(position: Tensor, same: list[Tensor]) -> Tensor:
            return self._one_position(position, caches, same)

        def finished(position: Tensor, same: list[Tensor]) -> Tensor:
            return popxl.constant(0, popxl.int32)

        def one_position(position: Tensor, going_on: Tensor, same: list[Tensor]) -> list[Tensor]:
            nothing = ir.create_graph(finished, position, same)
            going = ir.create_graph(advance, position, same)
            done = ops.logical_not(ops.cast(going_on, popxl.bool))
            given = [position, *same]
            # In this order: plans, which do not know the condition, take it for false.
            (left,) = ops.conditional(done, nothing, going, given, given)
            return [position + 1, left]

        first, going_on = popxl.constant(0, popxl.int32), self._any_going_on()
        loop = ir.create_graph(one_position, first, going_on, same)
        ops.repeat(loop, self.model.output_length, first, going_on, *same)

    def _any_going_on(self) -> Tensor:
        """Whether any micro-batch has a prompt that needs more tokens: int32 scalar, 0 if not."""

        def add(step: Tensor, any_so_far: Tensor) -> list[Tensor]:
            one = self._going_on.load(step)
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
