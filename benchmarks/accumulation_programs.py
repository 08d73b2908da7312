"""Gradient accumulation as PopXL programs: one reduction per step, or one per micro-batch.

- *Naive*, like `optax.MultiSteps`: the gradients of each micro-batch are averaged over all devices
  and added to a running mean; the optimizer steps after the last one.
- *Local*, like fine-tuning: each device sums its own gradients, and one reduction per step averages
  the sums.

The model is made of GPT-J's layers, with all state on the devices. The devices are virtual ones of
one process, or several processes with one each: `measure_in_processes` starts these as
`python3 -m benchmarks.accumulation_programs SETTINGS`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import numpy as np

import popdist
import popxl
import popxl_addons as addons
from benchmarks import run_in_processes
from config.gptj import GPTJConfig
from modelling.decoder import decoder_weight_map
from modelling.gptj.model import decoder_spec
from modelling.layers import BlockContext, use_run_config
from popxl import ops
from popxl_addons.optimizers.adam import AdamOptimizerStep

AccumulationMethod = Literal["naive", "local"]
METHODS: tuple[AccumulationMethod, ...] = ("naive", "local")
COUNTS = (1, 2, 8, 32, 64)


@dataclass(frozen=True)
class ModelAndBatchSize:
    """Sizes of a causal transformer and its global batch.

    Attributes:
        batch: samples of a global batch.
        rate: learning rate of AdamW.
    """

    layers: int = 2
    hidden: int = 192
    heads: int = 4
    vocabulary: int = 512
    length: int = 16
    batch: int = 512
    rate: float = 1e-3

    def samples(self, steps: int) -> np.ndarray:
        """Returns learnable token ids, one batch per step: int32 (steps, batch, length + 1).

        Each token follows from the one before, with some noise.
        """
        rng = np.random.default_rng(0)
        shape = (steps, self.batch, self.length + 1)
        tokens = np.empty(shape, np.int32)
        tokens[..., 0] = rng.integers(0, self.vocabulary, shape[:2])
        for i in range(1, shape[2]):
            tokens[..., i] = (
                3 * tokens[..., i - 1] + rng.integers(0, 3, shape[:2])
            ) % self.vocabulary
        return tokens


@dataclass(frozen=True)
class AccumulationRun:
    """Measured training run that accumulated gradients by one of the two methods.

    Attributes:
        processes, devices: on which it ran; devices of all processes.
        micro_batches: on each device in a step.
        seconds: of a step, the median.
        reduced: bytes that a device brings into reductions in a step.
        reductions: how many reductions a device takes part in.
        losses: of the first steps.
    """

    method: AccumulationMethod
    processes: int
    devices: int
    micro_batches: int
    seconds: float
    reduced: int
    reductions: int
    losses: list[float]


ROTARY = 8
"""Features of a head that are rotated."""


class ModelWithLoss(addons.Module):
    """Transformer layers with the token loss, as one PopXL module."""

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__()
        self._config, model = config, decoder_spec(config)
        with use_run_config(config):
            self.embeddings, self.head = model.embeddings(), model.head()
            self.layer = addons.Module.from_list(list(map(model.block, model.layer_types)))

    def build(self, input_ids: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        """Build the loss: input_ids, labels int32 (micro-batch, length) -> token mean, float32."""
        weight = popxl.constant(1 / input_ids.nelms, popxl.float32)
        with use_run_config(self._config):
            x = self.embeddings(input_ids)
            for layer in self.layer:
                x = layer(x, BlockContext())
            (loss,) = self.head(x, labels=labels, weight=weight)
        return loss


def build_config(size: ModelAndBatchSize, devices: int) -> GPTJConfig:
    """Returns the configuration of a GPT-J with the given sizes."""
    model = {
        "layers": size.layers,
        "hidden_size": size.hidden,
        "sequence_length": size.length,
        "initializer_range": 0.05,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "embedding": {"vocab_size": size.vocabulary},
        "attention": {"heads": size.heads, "rotary_dim": ROTARY},
    }
    execution = {"data_parallel": devices, "micro_batch_size": 1}
    training = {"global_batch_size": size.batch}
    return GPTJConfig.from_dict({"model": model, "execution": execution, "training": training})


class AccumulationProgram:
    """PopXL program of one optimizer step that accumulates gradients by one of the two methods.

    Args:
        ir: an empty one, for some replicas.
    """

    def __init__(
        self, size: ModelAndBatchSize, method: AccumulationMethod, micro_batches: int, ir: popxl.Ir
    ) -> None:
        self.size, self.micro_batches, self.ir = size, micro_batches, ir
        self.config = build_config(size, ir.replication_factor)
        self.ir.num_host_transfers = micro_batches
        samples, remainder = divmod(size.batch, micro_batches * ir.replication_factor)
        assert not remainder, "the batch is cut evenly"
        with self.ir.main_graph:
            spec = (samples, size.length)
            self.input_ids = popxl.h2d_stream(spec, popxl.int32, "input_ids")
            self.labels = popxl.h2d_stream(spec, popxl.int32, "labels")
            self.loss = popxl.d2h_stream((), popxl.float32, "loss")
            self.facts, self.forward = ModelWithLoss(self.config).create_graph(
                self.input_ids.spec, self.labels.spec
            )
            self.variables = self.facts.init(empty=True)
            sums = (
                self._reduce_each_micro_batch() if method == "naive" else self._accumulate_locally()
            )
            self._apply_optimizer(sums)

    # ---- gradients ------------------------------------------------------------------------------
    def _accumulate_locally(self) -> dict[str, popxl.Tensor]:
        """Accumulate gradients on each device, and all-reduce their sums once per step."""
        facts, grad = addons.autodiff_with_accumulation(
            self.forward, self.forward.args.tensors, [self.forward.graph.outputs[0]]
        )
        sums = facts.init_zero()

        def micro_batch(names: list[str], by_ref: list[popxl.TensorByRef], w: list) -> None:
            accumulators = addons.NamedTensors.pack(names, by_ref)
            call, one = self._forward_loss(w)
            grad.bind(accumulators).call(one, args=grad.grad_graph_info.inputs_dict(call))

        names, tensors = sums.unpack()
        self._repeat_micro_batches(partial(micro_batch, names), tensors)
        return {
            n: ops.collectives.replicated_all_reduce(sums.accum.get(n), "mean")
            for n in self.facts.keys_flat()
        }

    def _reduce_each_micro_batch(self) -> dict[str, popxl.Tensor]:
        """All-reduce the gradients of each micro-batch separately, and average them."""
        args = self.forward.args
        grad = addons.autodiff(self.forward, [self.forward.graph.outputs[0]], args.values_flat())
        sums = {n: ops.init(t.shape, popxl.float32, n) for n, t in args.to_dict().items()}
        counter = ops.init((), popxl.float32, "counter")

        def micro_batch(by_ref: list[popxl.TensorByRef], w: list) -> None:
            *means, count = by_ref
            call, one = self._forward_loss(w)
            grads = grad.call(one, args=grad.grad_graph_info.inputs_dict(call))
            for mean, g in zip(means, grads, strict=True):
                average = ops.collectives.replicated_all_reduce(g, "mean")
                ops.var_updates.accumulate_mean_(mean, average, count)
            ops.var_updates.accumulate_(count, popxl.constant(1, popxl.float32))

        self._repeat_micro_batches(micro_batch, [*sums.values(), counter])
        return sums

    def _forward_loss(self, weights: list) -> tuple[ops.CallSiteInfo, popxl.Tensor]:
        """Compute and store a micro-batch's loss; returns the graph call and the loss gradient."""
        named = addons.NamedTensors.pack(self.variables.keys_flat(), weights)
        batch = ops.host_load(self.input_ids), ops.host_load(self.labels)
        call = self.forward.bind(named).call_with_info(*batch)
        ops.host_store(self.loss, call.parent_output(0))
        return call, popxl.constant(1, popxl.float32)

    def _repeat_micro_batches(self, body, tensors) -> None:
        weights = self.variables.values_flat()
        graph = self.ir.create_graph(body, list(tensors), weights)
        ops.repeat(graph, self.micro_batches, *tensors, *weights)

    # ---- optimizer ------------------------------------------------------------------------------
    def _apply_optimizer(self, grads: dict[str, popxl.Tensor]) -> None:
        for name, variable in self.variables.to_dict().items():
            facts, step = AdamOptimizerStep().create_graph(
                variable.spec, grads[name].spec, lr=self.size.rate, weight_decay=0.0, eps=1e-8,
                first_order_dtype=popxl.float32,
            )  # fmt: skip
            step.bind(facts.init(f"optim.{name}")).call(variable, grads[name])

    # ---- running --------------------------------------------------------------------------------
    def initial_values_by_variable(self) -> dict:
        """Returns the same initial weights for all programs of a model size, by variable."""
        weight_map = decoder_weight_map(self.config, decoder_spec(self.config))
        trees = {}
        for layer in weight_map.layers:
            fwd = self.variables.get(layer)
            trees[layer] = addons.NamedTensors(fwd=fwd)
        initial_values = weight_map.to_variables(weight_map.init_weights(0), trees)
        return {variable: make() for variable, make in initial_values.items()}

    def shard_batch(self, tokens: np.ndarray) -> dict[popxl.HostToDeviceStream, np.ndarray]:
        """Shard token ids by replica: (batch, length + 1) -> (micro-batches, replicas, ...)."""
        replicas, local_replicas = self.ir.replication_factor, self.ir.instance_replication_factor
        first = local_replicas * popdist.getInstanceIndex() if local_replicas < replicas else 0
        shape = (self.micro_batches, replicas, *self.input_ids.shape)
        parts = {self.input_ids: tokens[:, :-1], self.labels: tokens[:, 1:]}
        return {
            stream: np.ascontiguousarray(t).reshape(shape)[:, first : first + local_replicas]
            for stream, t in parts.items()
        }


def train_steps_of_program(
    program: AccumulationProgram, steps: int
) -> tuple[list[float], list[float]]:
    """Run `steps` optimizer steps; returns the loss and the seconds of each step."""
    losses, seconds = [], []
    with popxl.Session(program.ir, "cpu") as session:
        session.write_variables_data(program.initial_values_by_variable())
        for tokens in program.size.samples(steps):
            shard_batch = program.shard_batch(tokens)
            start = time.perf_counter()
            losses.append(float(session.run(shard_batch)[program.loss].mean()))
            seconds.append(time.perf_counter() - start)
    return losses, seconds


def measure_run(
    size: ModelAndBatchSize,
    method: AccumulationMethod,
    micro_batches: int,
    replication: int | Literal["popdist"],
    steps: int,
) -> AccumulationRun:
    """Measure `steps` optimizer steps; the median time leaves out the slower first step."""
    program = AccumulationProgram(size, method, micro_batches, popxl.Ir(replication=replication))
    losses, seconds = train_steps_of_program(program, steps)
    return AccumulationRun(
        method,
        popdist.getNumInstances(),
        program.ir.replication_factor,
        micro_batches,
        statistics.median(seconds[1:]),
        *list_reductions(program.ir),
        np.mean(popdist.all_gather_object(losses), 0).tolist(),
    )


def list_reductions(ir: popxl.Ir) -> tuple[int, int]:
    """Returns the bytes that a device contributes to a run's collectives, and their number."""
    all_collectives = list_collectives(ir)
    return sum(c.nbytes for c in all_collectives), sum(c.count for c in all_collectives)


def list_collectives(ir: popxl.Ir) -> list[popxl.plan.Collective]:
    """Returns the collective operations in the plan of a program."""
    return [c for part in popxl.plan.plan_of(ir).parts for c in part.collectives]


def measure_both(
    size: ModelAndBatchSize, micro_batches: int, replication: int | Literal["popdist"], steps: int
) -> tuple[AccumulationRun, AccumulationRun]:
    """Measure both accumulation methods in this process: (per micro-batch, once per step)."""
    naive, local = (
        measure_run(size, method, micro_batches, replication, steps) for method in METHODS
    )
    return naive, local


# ---- several processes --------------------------------------------------------------------------
def measure_in_processes(
    size: ModelAndBatchSize, micro_batches: int, processes: int, steps: int
) -> tuple[AccumulationRun, AccumulationRun]:
    """Measure both accumulation methods in several processes with a replica each, over gloo."""
    settings = json.dumps([asdict(size), micro_batches, steps])
    pair = run_in_processes(processes, "benchmarks.accumulation_programs", settings)
    naive, local = (AccumulationRun(**fields) for fields in pair)
    return naive, local


def run_as_process(settings: str) -> None:
    """Measure as one of several processes; process 0 prints the result as JSON."""
    popdist.init()  # layers look at the devices
    size, micro_batches, steps = json.loads(settings)
    both = measure_both(ModelAndBatchSize(**size), micro_batches, "popdist", steps)
    if popdist.getInstanceIndex() == 0:
        print(json.dumps([asdict(m) for m in both]))


if __name__ == "__main__":
    run_as_process(sys.argv[1])
