"""The decode loop on its own: a toy that knows beforehand what it will say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import popxl
from modelling.generation import InitialDecodeState, SearchContext, SpecialTokenIds, generate_tokens
from modelling.generation.single_sequence import SingleSequenceSearch
from modelling.layers import ParallelGroups
from popxl import Tensor, TensorSpec, ops
from popxl_addons import BoundGraph

START = 9
SPECIAL = SpecialTokenIds(eos_token_id=1, pad_token_id=0)
LENGTH = 6
SCRIPT = np.array(
    [
        [5, 6, 1, 7, 7, 7],  # goes on after its end, which nobody must see
        [3, 1, 8, 8, 8, 8],
    ]
)
SAID = np.array([[5, 6, 1, 0, 0, 0], [3, 1, 0, 0, 0, 0]])


class Said(SingleSequenceSearch):
    """The only logit is the token itself."""

    def choose_tokens(self, logits: Tensor, position: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return ops.cast(logits.reshape((logits.shape[0],)), popxl.int32)


def run(
    script: np.ndarray, is_real_prompt: list[bool], data_parallel: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Decode scripted samples, shared out to the replicas.

    Returns:
        The tokens, (samples, LENGTH), and the words read at each position: (positions, samples),
        with -1 where the step was skipped.
    """
    batch = len(script) // data_parallel
    ir = popxl.Ir(replication=data_parallel)
    ir.num_host_transfers = LENGTH
    with ir.main_graph:
        groups = ParallelGroups.from_current_ir(1)
        apart = ir.replica_grouping(group_size=1)
        shared_out = (data_parallel, batch) if data_parallel > 1 else (batch,)
        said = popxl.variable(
            script.reshape(*shared_out, LENGTH).astype(np.float32), replica_grouping=apart
        )
        asked = popxl.variable(np.reshape(is_real_prompt, shared_out), replica_grouping=apart)
        read = popxl.d2h_stream((batch,), popxl.int32, "read")
        tokens = popxl.d2h_stream((batch, LENGTH), popxl.int32, "tokens")

        def step(position: Tensor, input_ids: Tensor, cache: Tensor, said: Tensor) -> list[Tensor]:
            """The script's next token as the only logit; the cache counts positions."""
            ops.host_store(read, input_ids.reshape((batch,)) + 1)
            return [ops.dynamic_slice(said, cache, [1], [1], no_overlap=True), cache + 1]

        position = TensorSpec((), popxl.int32)
        input_ids = TensorSpec((batch, 1), popxl.int32)
        graph = ir.create_graph(step, position, input_ids, position, said)
        first = popxl.constant(np.full((batch, 1), START), popxl.int32)
        caches = [popxl.constant(0, popxl.int32)]
        start = InitialDecodeState(
            BoundGraph(graph, {graph.inputs[-1]: said}), caches, first, asked, first
        )
        search = Said(SearchContext(groups, SPECIAL, LENGTH))
        ops.host_store(tokens, generate_tokens(start, LENGTH, search, [], groups))
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    by_transfer = found[read].reshape(LENGTH, -1) - 1
    return found[tokens].reshape(LENGTH, -1, LENGTH)[0], by_transfer


@pytest.mark.parametrize("dp", [1, 2])
def test_sequences_end_with_their_end_token_and_the_loop_with_the_last_of_them(dp):
    """With two replicas each has one sample: the one that has ended waits for the other."""
    tokens, read = run(SCRIPT, [True, True], dp)
    np.testing.assert_array_equal(tokens, SAID)
    np.testing.assert_array_equal(read, [[9, 9], [5, 3], [6, 1], *[[-1, -1]] * 3])


def test_samples_without_a_prompt_are_left_out():
    tokens, read = run(SCRIPT, [False, True])
    np.testing.assert_array_equal(tokens, [[0] * LENGTH, SAID[1]])
    assert (read[2:] == -1).all()
    assert (run(SCRIPT, [False, False])[1] == -1).all()


def test_a_sequence_without_end_is_cut():
    endless = np.full((1, LENGTH), 4)
    np.testing.assert_array_equal(run(endless, [True])[0], endless)
