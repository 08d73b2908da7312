"""Generation program that keeps all weights on the device, for all model families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import popxl
from config.sections import RunConfig
from modelling.generation.decode_loop import generate_tokens
from modelling.generation.generator import Generator, GeneratorFactory, create_search
from modelling.generation.greedy_search import GreedyStrategy
from modelling.generation.resident_executor import ResidentModel
from modelling.generation.search import DecodingStrategy
from modelling.ir_building import build_ir
from popxl import Tensor, ops
from popxl_addons import NamedTensors


@dataclass(frozen=True)
class GenerationProgram:
    """A program that generates text: its Ir, input and output streams, and weight variables.

    A run takes `ir.num_host_transfers` micro-batches on each replica; the replicas of a
    tensor-parallel group need equal ones.

    Attributes:
        input_ids, mask: streams of prompts, int32 (micro_batch_size, prompt_length).
        inputs: streams of the search's inputs, by name.
        tokens: stream of the generated tokens, int32 (micro_batch_size * prompts_per_sample,
            output_length).
        variables: by layer and path of the family's weight map; of a streamed program, by phase,
            layer of the phase, `fwd` and path.
        starts_stream: of a program that generates one token per run: true if the run reads the
            prompts first, bool (micro_batch_size,).
        unfinished_stream: of such a program: true if a prompt needs more tokens, bool scalar.
    """

    ir: popxl.Ir
    input_ids: popxl.HostToDeviceStream
    mask: popxl.HostToDeviceStream
    inputs: Mapping[str, popxl.HostToDeviceStream]
    tokens: popxl.DeviceToHostStream
    variables: NamedTensors | Mapping[str, Sequence[NamedTensors]]
    starts_stream: popxl.HostToDeviceStream | None = None
    unfinished_stream: popxl.DeviceToHostStream | None = None

    @property
    def prompts_per_sample(self) -> int:
        """Largest number of prompts that are packed into one sample."""
        return self.tokens.shape[0] // self.input_ids.shape[0]


def build_resident_program(
    config: RunConfig, make_generator: GeneratorFactory, strategy: DecodingStrategy | None = None
) -> GenerationProgram:
    """Build the generation program with resident weights; all variables start as zeros.

    Args:
        config: needs `model.eval`.
        strategy: decoding strategy; None: greedy search.
    """
    strategy = strategy or GreedyStrategy()
    with build_ir(config) as (ir, groups):
        ir.num_host_transfers = config.execution.device_iterations
        generator = make_generator(config, strategy.sequences_per_prompt)
        batch = config.execution.micro_batch_size
        model = ResidentModel(generator, batch, groups)
        search = create_search(strategy, generator, groups)
        program = create_streams_and_variables(ir, generator, batch, strategy, model)
        names, values = program.variables.unpack()  # type: ignore[union-attr]

        def generate_batch(values: list[Tensor]) -> None:
            weights = NamedTensors.pack(names, values)
            prompt = ops.host_load(program.input_ids), ops.host_load(program.mask)
            loaded = [ops.host_load(stream) for stream in program.inputs.values()]
            start = model.prefill(weights, *prompt)
            tokens = generate_tokens(start, generator.output_length, search, loaded, groups)
            ops.host_store(program.tokens, tokens)

        ops.repeat(ir.create_graph(generate_batch, values), ir.num_host_transfers, *values)
    return program


def create_streams_and_variables(
    ir: popxl.Ir,
    generator: Generator,
    batch_size: int,
    strategy: DecodingStrategy,
    model: ResidentModel,
) -> GenerationProgram:
    """Create a generation program's streams and variables at the start of its main graph."""
    prompts, length = (batch_size, generator.prompt_length), generator.output_length
    count = batch_size * generator.prompts_per_sample
    input_ids, mask = (
        popxl.h2d_stream(prompts, popxl.int32, name) for name in ("input_ids", "mask")
    )
    inputs = {
        name: popxl.h2d_stream(spec.shape, spec.dtype, name)
        for name, spec in strategy.input_specs(count, length).items()
    }
    return GenerationProgram(
        ir,
        input_ids,
        mask,
        inputs,
        popxl.d2h_stream((count, length), popxl.int32, "tokens"),
        model.facts.inputs.init(empty=True),
    )
