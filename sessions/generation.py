"""The generation session of a configured model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

import popxl
from config.sections import RunConfig
from data.loader import BatchSharding
from data.samples import EMPTY, concatenate, pack
from modelling.generation import DecodingStrategy
from modelling.generation.decoding_strategy import strategy_from_config
from modelling.spec import get_family
from modelling.weights import Variables
from planning.generation_placement import build_generation_program
from popxl_addons import NamedTensors
from sessions.session import ModelSession


class GenerationSession(ModelSession):
    """Generates with a model. Use it as a context; weights must be written before it generates.

    A run of the program takes several micro-batches on each data-parallel replica: as many as
    `execution.device_iterations` where the weights are on the device, and a large batch where they
    are streamed (see `generation.weights`).
    """

    def __init__(
        self,
        config: RunConfig,
        strategy: DecodingStrategy | None = None,
        weight_source: ModelSession | None = None,
        token_by_token: bool = False,
    ) -> None:
        """Build and compile the program.

        Args:
            config: one for training serves as well.
            strategy: how tokens are chosen; None: as `generation` of the configuration says, but
                without stop texts.
            weight_source: see `ModelSession`. Weights that are on the device are a copy.
            piecewise: for `stream`, which gives tokens as they come where weights are resident.
        """
        family = get_family(config)
        config = replace(config, model=replace(config.model, eval=True))
        self._strategy = strategy_from_config(config) if strategy is None else strategy
        shared_bytes = None if weight_source is None else weight_source.host_bytes
        self.program = build_generation_program(
            config, family, self._strategy, shared_bytes, token_by_token
        )
        self._sharding = BatchSharding.of(config, self.program.ir.num_host_transfers)
        weight_map, program_variables = family.weight_map(config), self.program.variables
        variables: Variables
        if isinstance(program_variables, NamedTensors):
            weight_map = family.weight_map(config.changed({"execution.expert_groups": 1}))
            variables = {
                layer: NamedTensors(fwd=program_variables.get(layer)) for layer in weight_map.layers
            }
        else:
            variables = program_variables
        super().__init__(config, self.program.ir, weight_map, variables, weight_source)

    @property
    def samples_per_run(self) -> int:
        """Samples of one run of the program: prompts, or groups of them that share one."""
        execution, batches = self.config.execution, self.program.ir.num_host_transfers
        return batches * execution.data_parallel * execution.micro_batch_size

    def generate(
        self,
        input_ids: np.ndarray,
        mask: np.ndarray,
        on_progress: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """Generate for any number of prompts.

        Args:
            input_ids: (n, sequence_length) token ids, a prompt in each row, padded on the right.
            mask: same shape, 1 where there is a token.
            on_progress: called after each run with the number of prompts it did.

        Returns:
            int32 (n, decoder_sequence_length): tokens up to and including the end token, then
            padding.

        Raises:
            ValueError: the arrays do not have these shapes.
        """
        self._check(input_ids, mask)
        lengths, capacity = mask.sum(axis=1), input_ids.shape[1]
        tokens = np.zeros((len(input_ids), *self.program.tokens.shape[1:]), np.int32)
        packed = pack(lengths, capacity, self.program.prompts_per_sample)
        for start in range(0, len(packed), self.samples_per_run):
            part = np.full((self.samples_per_run, packed.shape[1]), EMPTY)
            part[: len(packed) - start] = packed[start : start + self.samples_per_run]
            own = part[self._sharding.positions(len(part))]
            filled = concatenate(own, lambda i: input_ids[i, : lengths[i]], capacity, pad=0)
            indices = part.reshape(-1)
            there = indices != EMPTY
            tokens[indices[there]] = self._answers(own.reshape(-1), *filled)[there]
            if on_progress is not None:
                on_progress(int(np.count_nonzero(there)))
        return tokens

    def stream(self, input_ids: np.ndarray, mask: np.ndarray) -> Iterator[np.ndarray]:
        """Generate for one prompt, and give what there is of the tokens each time that one comes.

        Args:
            input_ids, mask: as for `generate`, (1, sequence_length).
        """
        self._check(input_ids, mask)
        program, length = self.program, int(mask.sum())
        if program.starts_stream is None or program.unfinished_stream is None:
            yield self.generate(input_ids, mask)
            return
        part = np.full((self.samples_per_run, program.prompts_per_sample), EMPTY)
        part[0, 0] = 0
        own = part[self._sharding.positions(len(part))]
        inputs = self._inputs(
            own.reshape(-1),
            *concatenate(own, lambda i: input_ids[i, :length], input_ids.shape[1], pad=0),
        )
        for position in range(program.tokens.shape[1]):
            begin = self._sharding.to_replicas(np.full(len(own), position == 0))
            found = self._run({**inputs, program.starts_stream: begin})
            yield self._collected(found[program.tokens])[:1]
            if not found[program.unfinished_stream].any():
                return

    def _answers(self, indices: np.ndarray, input_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The tokens for all prompts of one run of the program.

        Args:
            indices: the numbers of the prompts for the replicas of this process, or `EMPTY`.
            input_ids, mask: their samples.
        """
        return self._collected(
            self._run(self._inputs(indices, input_ids, mask))[self.program.tokens]
        )

    def _inputs(
        self, indices: np.ndarray, input_ids: np.ndarray, mask: np.ndarray
    ) -> dict[popxl.HostToDeviceStream, np.ndarray]:
        """What one run reads; arguments as for `_answers`."""
        program, dealt = self.program, self._sharding.to_replicas
        inputs = {program.input_ids: dealt(input_ids), program.mask: dealt(mask)}
        for name, array in self._strategy.input_arrays(indices, program.tokens.shape[1]).items():
            inputs[program.inputs[name]] = dealt(array)
        return inputs

    def _collected(self, tokens: np.ndarray) -> np.ndarray:
        """What the replicas gave, in the order of the samples."""
        copies = tokens[:, :: self.config.execution.tensor_parallel]
        return copies.reshape(-1, *self.program.tokens.shape[1:])

    def _check(self, input_ids: np.ndarray, mask: np.ndarray) -> None:
        length = self.program.input_ids.shape[1]
        for name, array in (("input_ids", input_ids), ("mask", mask)):
            if array.shape != (len(input_ids), length):
                raise ValueError(
                    f"{name} has shape {array.shape}, but must be ({len(input_ids)}, {length}): "
                    "samples × sequence_length"
                )
