"""Modules and their gradients at any tensor parallelism, compared with torch.

A case is a module of ours, and a torch function that computes the same from the same logical
weights. Both get the same inputs, and the same gradients of their outputs; outputs, gradients of
inputs and gradients of weights must agree. All cases go into one program, since compiling is what
takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

import popxl
import popxl_addons as addons
from config.t5 import T5Config
from modelling.weights import WeightMapping
from popxl_addons.patterns import apply_pre_alias_patterns
from tests.slow import slow

TENSOR_PARALLEL = (1, slow(2), 4)
TOLERANCE = 1e-5
"""Largest error, relative to the largest element: a few roundings of float32 sums."""


@dataclass(frozen=True)
class Case:
    """A module with one output, and its reference.

    Attributes:
        make: makes the module, given the tensor parallelism, in the main graph.
        reference: the same in torch; uses `parameters`.
        inputs: of both, the same on all replicas.
        rows: the module's variables.
        parameters: torch's logical weights by name.
        grad: gradient of the output.
    """

    make: Callable[[int], addons.Module]
    reference: Callable[..., torch.Tensor]
    inputs: Sequence[np.ndarray]
    rows: Sequence[WeightMapping]
    parameters: Mapping[str, torch.Tensor]
    grad: np.ndarray

    @property
    def names(self) -> list[str]:
        """Logical weights of the module."""
        return [w.name for row in self.rows for w in row.weights]

    @cached_property
    def expected(self) -> Result:
        """The reference's outputs, in torch."""
        return run_reference(self)


@dataclass(frozen=True)
class Result:
    """Outputs and gradients of a case, by name."""

    arrays: Mapping[str, np.ndarray]

    def check(self, reference: Result, tolerance: float = TOLERANCE) -> float:
        """Assert that all arrays agree; returns the largest relative error."""
        assert self.arrays.keys() == reference.arrays.keys()
        errors = {n: error_of(self.arrays[n], x) for n, x in reference.arrays.items()}
        too_large = {n: f"{e:.1e}" for n, e in errors.items() if e > tolerance}
        assert not too_large
        return max(errors.values())


def error_of(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest error, relative to the largest element."""
    assert ours.shape == theirs.shape
    assert np.abs(theirs).max() > 0, "an array of zeros tests nothing"
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def with_fused_attention(config: Any) -> Any:
    """The configuration with attention that never holds all scores."""
    return replace(config, execution=replace(config.execution, attention="fused"))


def small_config(tensor_parallel: int = 1, slices: int = 1, **model: object) -> T5Config:
    """A small T5. Its heads × d_kv is not its hidden size, as in FLAN-T5 small."""
    attention = {"heads": 4, "d_kv": 3, "relative_attention_num_buckets": 8}
    attention |= {"relative_attention_max_distance": 9}
    small = {"layers": 2, "hidden_size": 16, "d_ff": 24, "embedding": {"vocab_size": 40}}
    small |= {"sequence_length": 12, "decoder_sequence_length": 4, "attention": attention}
    execution = {"tensor_parallel": tensor_parallel, "attention_serialisation": slices}
    training = {"global_batch_size": 1}
    return T5Config.from_dict(
        {"model": small | model, "execution": execution, "training": training}
    )


def check_cases(cases: Mapping[str, Case], tensor_parallel: int) -> None:
    """Assert that all modules compute what their references do, on one tensor-parallel group."""
    results = run_cases(cases, tensor_parallel)
    for name, case in cases.items():
        results[name].check(case.expected)


# ---- ours ---------------------------------------------------------------------------------------
def run_cases(cases: Mapping[str, Case], tensor_parallel: int) -> dict[str, Result]:
    """Run all modules and their gradients on one tensor-parallel group."""
    ir = popxl.Ir(replication=tensor_parallel)
    with ir.main_graph:
        built = {name: _Built(case, tensor_parallel) for name, case in cases.items()}
    apply_pre_alias_patterns(ir)
    with popxl.Session(ir, "cpu") as session:
        session.write_variables_data({k: v for b in built.values() for k, v in b.data().items()})
        outputs = session.run()
    return {name: b.result(outputs) for name, b in built.items()}


class _Built:
    """A case in the program."""

    def __init__(self, case: Case, tensor_parallel: int) -> None:
        self.case, self.tensor_parallel = case, tensor_parallel
        inputs = [popxl.variable(x) for x in case.inputs]
        facts, graph = case.make(tensor_parallel).create_graph(*(t.spec for t in inputs))
        self.variables = facts.init()
        (output,) = graph.graph.outputs
        gradient = graph.autodiff(grads_provided=[output])
        info = gradient.grad_graph_info
        call = graph.bind(self.variables).call_with_info(*inputs)
        grad_call = gradient.call_with_info(
            popxl.constant(case.grad, popxl.float32), args=info.inputs_dict(call)
        )
        grads = info.fwd_parent_ins_to_grad_parent_outs(call, grad_call)
        self.output = addons.host_store(call.parent_output(0))
        self.inputs = {i: addons.host_store(grads[t]) for i, t in enumerate(inputs) if t in grads}
        self.weights = {
            path: addons.host_store(grads[t]) for path, t in self.variables.to_dict().items()
        }

    def data(self) -> dict[popxl.Variable, np.ndarray]:
        """Host data of the variables."""
        logical = {n: p.detach().numpy() for n, p in self.case.parameters.items()}
        paths = {row.path: row for row in self.case.rows}
        assert paths.keys() == self.weights.keys()
        return {
            self.variables.get(path): row.to_variable_data(logical, self.tensor_parallel)
            for path, row in paths.items()
        }

    def result(self, stored: Mapping[popxl.DeviceToHostStream, np.ndarray]) -> Result:
        arrays = {"output": self._same_on_all(stored[self.output])}
        for i, stream in self.inputs.items():
            arrays[f"input {i}"] = self._same_on_all(stored[stream])
        for row in self.case.rows:
            gradient = stored[self.weights[row.path]]
            if row.axis is None:
                gradient = self._same_on_all(gradient)
            arrays.update(row.to_logical_weights(gradient, self.tensor_parallel))
        return Result(arrays)

    def _same_on_all(self, stored: np.ndarray) -> np.ndarray:
        """Returns an array that all replicas stored, after checking that they are equal."""
        if self.tensor_parallel == 1:
            return stored
        for other in stored[1:]:
            np.testing.assert_array_equal(other, stored[0])
        return stored[0]


# ---- torch --------------------------------------------------------------------------------------
def run_reference(case: Case) -> Result:
    """Runs the reference of a case in torch."""
    inputs = [torch.tensor(x) for x in case.inputs]
    floats = {f"input {i}": t for i, t in enumerate(inputs) if t.is_floating_point()}
    wanted = {**floats, **{name: case.parameters[name] for name in case.names}}
    for t in floats.values():
        t.requires_grad_()
    output = case.reference(*inputs)
    grads = torch.autograd.grad(output, list(wanted.values()), torch.tensor(case.grad))
    arrays = {name: g.numpy() for name, g in zip(wanted, grads, strict=True)}
    return Result({"output": output.detach().numpy(), **arrays})
