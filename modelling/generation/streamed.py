"""The program that generates layer by layer: the same for all families.

For each position every layer's weights pass the device once, over all micro-batches of a run. The
device holds one layer and one micro-batch at a time; so a model that was trained by phases can
write on the same machine. The tokens are those of the resident program (`build_generation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

import popxl
from config.sections import RunConfig
from machine.devices import new_ir
from modelling.fp8 import linear_layers
from modelling.generation.condition import is_any
from modelling.generation.greedy import Greedy
from modelling.generation.passes import Pass, Stack
from modelling.generation.program import GenerationProgram
from modelling.generation.search import Search, SearchContext, SpecialTokens, Strategy
from modelling.layers import Groups, LMHeadLoss
from modelling.phases.buffers import InputBuffers, Port, over_layers
from modelling.phases.settings import Settings
from popxl import Tensor, TensorSpec, ops
from popxl_addons import Module, NamedTensors
from popxl_addons.patterns import apply_pre_alias_patterns


class Begun(NamedTuple):
    """Where generation of a micro-batch begins.

    Attributes:
        prompted: bool (prompts,), false for those that only fill up the batch.
        first: int32 (sequences, 1), the tokens read at the first position.
        read: see `Search.start`.
        facts: of the prompts, which all positions need.
    """

    prompted: Tensor
    first: Tensor
    read: Tensor
    facts: list[Tensor]


class At(NamedTuple):
    """Where a family's passes find what they read, for each micro-batch.

    Attributes:
        words, mask: the prompts.
        next_words: int32 (sequences, 1), the tokens to read next.
        parents: int32 (sequences,), see `Advance`; none where every sequence continues itself.
        facts: `Begun.facts`.
    """

    words: Port
    mask: Port
    next_words: Port
    parents: list[Port]
    facts: list[Port]


class StreamedGenerator(Protocol):
    """What a family provides, made in the Ir that it is to be used in.

    Attributes: see `Generator`; besides:
        sequences: in a micro-batch.
        stacks: those that `connect` made; with the head's, they have all weights of the model.
        x: where the last layer leaves its output; `connect` sets it.
    """

    prompt_length: int
    prompts_per_sample: int
    output_length: int
    sequences: int
    stacks: list[Stack]
    x: Port

    @property
    def special(self) -> SpecialTokens:
        """Tokens with a meaning."""
        ...

    def begin(self, words: Tensor, mask: Tensor) -> Begun:
        """What follows from a micro-batch's prompts alone."""
        ...

    def connect(self, at: At) -> None:
        """Make the passes."""
        ...

    def head(self) -> LMHeadLoss:
        """The module at the end of the model."""
        ...

    def head_stack(self, choose: Pass) -> Stack:
        """The stack of the pass that ends with the choice of a token; `head` is part of it."""
        ...

    def read(self) -> list[Tensor]:
        """Read the prompts; gives what is the same at all positions of all micro-batches."""
        ...

    def step(self, position: Tensor, same: Sequence[Tensor]) -> None:
        """Read the next words, at `position` (int32 scalar, from 0), as far as `x`."""
        ...


StreamedOf = Callable[[Settings, int], StreamedGenerator]
"""Makes the generator of a configuration in the current Ir, for so many sequences of a prompt."""


def build_streamed(
    config: RunConfig, streamed_of: StreamedOf, strategy: Strategy | None = None
) -> GenerationProgram:
    """Build the program of a configuration, whose `model.eval` must be set.

    A run takes `streamed_batches` micro-batches on each replica.

    Args:
        strategy: how to search; None: greedily.
    """
    strategy = strategy or Greedy()
    config = _with_batches(config, streamed_batches(config))
    ir = new_ir(config)
    ir.num_host_transfers = config.gradient_accumulation
    with ir.main_graph:
        settings = Settings(config, Groups.current(config.execution.tensor_parallel))
        with linear_layers(config):
            program = _Program(settings, streamed_of(settings, strategy.sequences), strategy)
        tokens = program.run()
    apply_pre_alias_patterns(ir, level="default")
    streams = program.inputs.streams
    searched = {name: streams[name] for name in program.searched}
    return GenerationProgram(
        ir, streams["words"], streams["mask"], searched, tokens, program.variables
    )


def streamed_batches(config: RunConfig) -> int:
    """Micro-batches of each data-parallel copy that a pass of the weights serves."""
    e = config.execution
    at_once = e.micro_batch_size * e.data_parallel
    wanted = config.generation.micro_batches
    return wanted or max(config.training.global_batch_size // at_once, e.device_iterations)


def _with_batches(config: RunConfig, count: int) -> RunConfig:
    """The configuration whose `Settings.steps` are `count`."""
    e = config.execution
    size = e.micro_batch_size * e.data_parallel * count
    return replace(config, training=replace(config.training, global_batch_size=size))


# ---- modules without weights, and the head ------------------------------------------------------
class _Start(Module):
    """From prompts to the first words, what the family needs, and what the search begins with."""

    def __init__(self, program: _Program) -> None:
        super().__init__()
        self._program = program

    def build(self, words: Tensor, mask: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        program = self._program
        prompted, first, read, facts = program.model.begin(words, mask)
        state = program.search.start(prompted, read, inputs)
        program.facts = len(facts)
        return program.outputs(first, _itself(first.shape[0]), state, facts)


class _Choose(Module):
    """From the last layer's output to the next words, with what the search makes of them."""

    def __init__(self, program: _Program) -> None:
        super().__init__()
        self.head = program.model.head()
        self._program = program

    def build(self, x: Tensor, state: list[Tensor], position: Tensor) -> list[Tensor]:
        logits = self.head.next_logits(x)
        words, parents, state = self._program.search.advance(logits, position, state)
        return self._program.outputs(words, parents, state)


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
        facts: how many tensors `Begun.facts` has.
    """

    def __init__(self, settings: Settings, model: StreamedGenerator, strategy: Strategy) -> None:
        self.settings, self.model, self.groups = settings, model, settings.groups
        self.reorders = strategy.sequences > 1
        self.facts = 0
        context = SearchContext(self.groups, model.special, model.output_length, strategy.rules)
        self.search = strategy.search(context)
        batch = settings.config.execution.micro_batch_size
        prompts = TensorSpec((batch, model.prompt_length), popxl.int32)
        self.count = batch * model.prompts_per_sample
        needed = strategy.inputs(self.count, model.output_length)
        self.searched = list(needed)
        self.inputs = InputBuffers({"words": prompts, "mask": prompts, **needed}, settings)
        self._build_passes()

    def outputs(
        self,
        words: Tensor,
        parents: Tensor | None,
        state: Sequence[Tensor],
        facts: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """A micro-batch's state between positions, and `facts`, as distinct tensors, since each is
        stored in a buffer of its own."""
        going_on = is_any(self.search.unfinished(list(state)), self.groups)
        first = [words, going_on]
        if self.reorders:
            assert parents is not None
            first.append(parents)
        return [ops.identity(t) for t in (*first, *state, *facts)]

    def _build_passes(self) -> None:
        model, settings, ports = self.model, self.settings, self.inputs.port
        searched = [ports(name) for name in self.searched]
        self._start = Pass(_Start(self), [ports("words"), ports("mask"), searched], settings)
        kept = self._start.outputs[: len(self._start.outputs) - self.facts]
        facts = self._start.outputs[len(kept) :]
        state = kept[3 if self.reorders else 2 :]
        words, self._going_on = kept[:2]
        parents = kept[2:3] if self.reorders else []
        with linear_layers(settings.config):
            model.connect(At(ports("words"), ports("mask"), words, parents, facts))
            position = TensorSpec((), popxl.int32)
            self._choose = Pass(
                _Choose(self), [model.x, state], settings, [position], kept, part="head"
            )
        self._head = model.head_stack(self._choose)
        self._tokens = Pass(_Tokens(self.search), [state], settings)

    @property
    def variables(self) -> Mapping[str, list[NamedTensors]]:
        """Of all phases."""
        return {
            name: layers
            for stack in (*self.model.stacks, self._head)
            for name, layers in stack.variables.items()
        }

    def run(self) -> popxl.DeviceToHostStream:
        """Add the whole program; gives the stream of the tokens."""
        tokens = popxl.d2h_stream((self.count, self.model.output_length), popxl.int32, "tokens")
        only, nothing = popxl.constant(0, popxl.int32), NamedTensors()
        self.inputs.load()
        with popxl.plan.part("search/prompt"):
            self._start.call(only, nothing)
        same = self.model.read()
        self._all_positions(same)
        with popxl.plan.part("search/end"):
            self._tokens.call(only, nothing)
            self._over_batches(
                lambda step: ops.host_store(tokens, self._tokens.outputs[0].at(step))
            )
        return tokens

    def _all_positions(self, same: list[Tensor]) -> None:
        """Write tokens until every prompt is answered; the remaining positions cost nothing."""
        ir = popxl.gir()

        def advance(position: Tensor, same: list[Tensor]) -> Tensor:
            self.model.step(position, same)
            with popxl.plan.part("head/token"):
                self._head.run(self._choose, position)
            return self._any_going_on()

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

        def add(step: Tensor, found: Tensor) -> list[Tensor]:
            one = self._going_on.at(step)
            return [step + 1, ops.maximum(found, ops.cast(one, popxl.int32))]

        zero = popxl.constant(0, popxl.int32)
        with popxl.plan.part("search/token"):
            found = popxl.constant(0, popxl.int32)
            graph = popxl.gir().create_graph(add, zero, found)
            return ops.repeat(graph, self.settings.micro_batches, zero, found)[1]

    def _over_batches(self, body: Callable[[Tensor], object]) -> None:
        def one(step: Tensor) -> list[Tensor]:
            body(step)
            return []

        over_layers(range(self.settings.micro_batches), one)
