"""The generation session of a configured model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

import popxl
from config.sections import RunConfig
from data.loader import BatchSharding
from data.packing import EMPTY_SLOT, concatenate_packed_sequences, pack_sequences
from modelling.generation import DecodingStrategy
from modelling.generation.decoding_strategy import strategy_from_config
from modelling.model_family import get_family
from modelling.weights import Variables
from planning.generation_placement import build_generation_program
from popxl_addons import NamedTensors
from sessions.session import ModelSession


class GenerationSession(ModelSession):
    """Generates text with a model. Use it as a context manager; write the weights first.

    A run of the program takes several micro-batches on each data-parallel replica:
    `execution.device_iterations` with the weights on the device, and a large batch with streamed
    weights (`generation.weights`).
    """

    def __init__(
        self,
        config: RunConfig,
        strategy: DecodingStrategy | None = None,
        weight_source: ModelSession | None = None,
        token_by_token: bool = False,
    ) -> None:
        """Build and compile the generation program.

        Args:
            config: one for training works, too.
            strategy: decoding strategy; None: that of the section `generation`, without stop
                strings.
            weight_source: see `ModelSession`. Weights that are on the device are a copy.
            token_by_token: for `stream`, which then yields each token, with resident weights.
        """
        family = get_family(config)
        config = replace(config, model=replace(config.model, eval=True))
        self._strategy = strategy_from_config(config) if strategy is None else strategy
        shared_bytes = None if weight_source is None else weight_source.host_bytes
        self.program = build_generation_program(
            config, family, self._strategy, shared_bytes, token_by_token
        )
        self._sharding = BatchSharding.from_config(config, self.program.ir.num_host_transfers)
        weight_map, program_variables = family.weight_map(config), self.program.variables
        variables: Variables
        if isinstance(program_variables, NamedTensors):
            weight_map = family.weight_map(config.with_values({"execution.expert_groups": 1}))
            variables = {
                layer: NamedTensors(fwd=program_variables.get(layer)) for layer in weight_map.layers
            }
        else:
            variables = program_variables
        super().__init__(config, self.program.ir, weight_map, variables, weight_source)

    @property
    def samples_per_run(self) -> int:
        """Samples per run of the program; a sample can contain several packed prompts."""
        execution, batches = self.config.execution, self.program.ir.num_host_transfers
        return batches * execution.data_parallel * execution.micro_batch_size

    def generate(
        self,
        input_ids: np.ndarray,
        mask: np.ndarray,
        on_progress: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """Generate answers to any number of prompts.

        Args:
            input_ids: int (n, sequence_length), a prompt in each row, padded on the right.
            mask: same shape, 1 for tokens and 0 for padding.
            on_progress: called after each run with its number of prompts.

        Returns:
            int32 (n, decoder_sequence_length): tokens up to and including the end token, then
            padding.

        Raises:
            ValueError: an array has another shape.
        """
        self._check_prompts(input_ids, mask)
        lengths, capacity = mask.sum(axis=1), input_ids.shape[1]
        tokens = np.zeros((len(input_ids), *self.program.tokens.shape[1:]), np.int32)
        packed = pack_sequences(lengths, capacity, self.program.prompts_per_sample)
        for start in range(0, len(packed), self.samples_per_run):
            run_prompts = np.full((self.samples_per_run, packed.shape[1]), EMPTY_SLOT)
            run_prompts[: len(packed) - start] = packed[start : start + self.samples_per_run]
            local = run_prompts[self._sharding.local_sample_indices(len(run_prompts))]
            samples = concatenate_packed_sequences(
                local, lambda i: input_ids[i, : lengths[i]], capacity, pad=0
            )
            prompt_indices = run_prompts.reshape(-1)
            is_prompt = prompt_indices != EMPTY_SLOT
            generated = self._run_prompts(local.reshape(-1), *samples)
            tokens[prompt_indices[is_prompt]] = generated[is_prompt]
            if on_progress is not None:
                on_progress(int(np.count_nonzero(is_prompt)))
        return tokens

    def stream(self, input_ids: np.ndarray, mask: np.ndarray) -> Iterator[np.ndarray]:
        """Generate for one prompt; yields the list of all tokens so far, after each new one.

        Args:
            input_ids, mask: as for `generate`, (1, sequence_length).
        """
        self._check_prompts(input_ids, mask)
        program, length = self.program, int(mask.sum())
        if program.starts_stream is None or program.unfinished_stream is None:
            yield self.generate(input_ids, mask)
            return
        prompts = np.full((self.samples_per_run, program.prompts_per_sample), EMPTY_SLOT)
        prompts[0, 0] = 0
        local = prompts[self._sharding.local_sample_indices(len(prompts))]
        inputs = self._make_run_inputs(
            local.reshape(-1),
            *concatenate_packed_sequences(
                local, lambda i: input_ids[i, :length], input_ids.shape[1], pad=0
            ),
        )
        for position in range(program.tokens.shape[1]):
            starts = self._sharding.distribute_to_replicas(np.full(len(local), position == 0))
            outputs = self._run({**inputs, program.starts_stream: starts})
            yield self._reorder_from_replicas(outputs[program.tokens])[:1]
            if not outputs[program.unfinished_stream].any():
                return

    def _run_prompts(
        self, prompt_indices: np.ndarray, input_ids: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        """Run the program on one batch: int (samples, length) -> int32 (prompts, output length).

        Args:
            prompt_indices: index of each prompt of this process's replicas, or `EMPTY_SLOT`.
            input_ids, mask: their samples.
        """
        outputs = self._run(self._make_run_inputs(prompt_indices, input_ids, mask))
        return self._reorder_from_replicas(outputs[self.program.tokens])

    def _make_run_inputs(
        self, prompt_indices: np.ndarray, input_ids: np.ndarray, mask: np.ndarray
    ) -> dict[popxl.HostToDeviceStream, np.ndarray]:
        """Input arrays of one program run, by stream; arguments as for `_run_prompts`."""
        program, to_replicas = self.program, self._sharding.distribute_to_replicas
        inputs = {program.input_ids: to_replicas(input_ids), program.mask: to_replicas(mask)}
        arrays = self._strategy.input_arrays(prompt_indices, program.tokens.shape[1])
        for name, array in arrays.items():
            inputs[program.inputs[name]] = to_replicas(array)
        return inputs

    def _reorder_from_replicas(self, tokens: np.ndarray) -> np.ndarray:
        """Reorder tokens from replicas to samples; each tensor-parallel group counts once."""
        copies = tokens[:, :: self.config.execution.tensor_parallel]
        return copies.reshape(-1, *self.program.tokens.shape[1:])

    def _check_prompts(self, input_ids: np.ndarray, mask: np.ndarray) -> None:
        length = self.program.input_ids.shape[1]
        for name, array in (("input_ids", input_ids), ("mask", mask)):
            if array.shape != (len(input_ids), length):
                raise ValueError(
                    f"{name} has shape {array.shape}, but must be ({len(input_ids)}, {length}): "
                    "samples × sequence_length"
                )
