"""Both ways in JAX, in several processes that talk through gloo.

    python3 -m benchmarks.accumulation.processes INDEX COUNT PORT WAY MICRO_BATCHES STEPS

is one of the processes; `measure` starts them. The model is a causal transformer with pre-norm
layers and without biases, of the size of that in `programs`.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.accumulation.settings import Measured, Size, Way
from config.errors import UserError

HOST = "127.0.0.1"


def measure(size: Size, way: Way, micro_batches: int, processes: int, steps: int) -> Measured:
    """Train for `steps` steps on as many processes, with a device each."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    arguments = [str(a) for a in (processes, port, way, micro_batches, steps)]
    command = [sys.executable, "-m", "benchmarks.accumulation.processes"]
    size_flag = json.dumps(asdict(size))
    workers = [
        subprocess.Popen([*command, str(i), *arguments, size_flag], stdout=subprocess.PIPE)
        for i in range(processes)
    ]
    try:
        outputs = [w.communicate()[0] for w in workers]
    finally:  # none waits for others that an interrupt ended
        for worker in workers:
            worker.kill()
    if any(w.returncode for w in workers):
        raise UserError(f"a process of {processes} ended with an error, which stands above")
    return Measured(**json.loads(outputs[0].splitlines()[-1]))  # gloo writes there, too


# ---- one process --------------------------------------------------------------------------------
def initial(size: Size) -> dict[str, Any]:
    """Weights, the same in every process."""
    import numpy as np

    rng = np.random.default_rng(0)
    h = size.hidden
    shapes = {"embedding": (size.vocabulary, h), "position": (size.length, h)}
    shapes["head"] = (h, size.vocabulary)
    for i in range(size.layers):
        shapes |= {f"{i}.qkv": (h, 3 * h), f"{i}.out": (h, h)}
        shapes |= {f"{i}.wi": (h, 4 * h), f"{i}.wo": (4 * h, h)}
    return {n: (rng.standard_normal(s) * 0.05).astype(np.float32) for n, s in shapes.items()}


def loss_of(size: Size) -> Callable[[Any, Any], Any]:
    """The mean loss of a token, of weights and tokens (samples, length + 1)."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def layer(w: Any, i: int, x: Any) -> Any:
        b, s, h = x.shape
        qkv = (norm(x) @ w[f"{i}.qkv"]).reshape(b, s, 3, size.heads, h // size.heads)
        x += (
            jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True).reshape(b, s, h)
            @ w[f"{i}.out"]
        )
        return x + jax.nn.gelu(norm(x) @ w[f"{i}.wi"]) @ w[f"{i}.wo"]

    def loss(w: Any, tokens: Any) -> Any:
        x = w["embedding"][tokens[:, :-1]] + w["position"]
        for i in range(size.layers):
            x = layer(w, i, x)
        logits = jax.nn.log_softmax(norm(x) @ w["head"])
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    return loss


def adam(size: Size, state: Any, grads: Any) -> Any:
    """A step of Adam. The state is (weights, first moments, second moments, steps)."""
    import jax
    import jax.numpy as jnp

    w, m, v, t = state
    t = t + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)

    def step(w: Any, m: Any, v: Any) -> Any:
        return w - size.rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

    return jax.tree.map(step, w, m, v), m, v, t


def naive_step(size: Size, micro_batches: int) -> Callable[..., Any]:
    """A step of one micro-batch: (state, means, index), tokens -> the same, loss."""
    import jax

    def step(carry: Any, tokens: Any) -> Any:
        state, means, index = carry
        loss, grads = jax.value_and_grad(loss_of(size))(state[0], tokens[0, 0])
        loss, grads = jax.lax.pmean((loss, grads), "r")
        means = jax.tree.map(lambda m, g: m + (g - m) / (index + 1), means, grads)
        last = index == micro_batches - 1
        state = jax.lax.cond(last, lambda: adam(size, state, means), lambda: state)
        return (state, means, (index + 1) % micro_batches), loss[None]

    return step


def local_step(size: Size, micro_batches: int) -> Callable[..., Any]:
    """A step of all micro-batches: (state, means, index), tokens -> the same, loss."""
    import jax

    def step(carry: Any, tokens: Any) -> Any:
        state, means, index = carry

        def micro_batch(sums: Any, t: Any) -> Any:
            found = jax.value_and_grad(loss_of(size))(state[0], t)
            return jax.tree.map(lambda a, b: a + b, sums, found), None

        zero = (jax.numpy.float32(0), jax.tree.map(jax.numpy.zeros_like, state[0]))
        sums, _ = jax.lax.scan(micro_batch, zero, tokens[0])
        mean = jax.tree.map(lambda a: a / micro_batches, sums)
        loss, grads = jax.lax.pmean(mean, "r")
        return (adam(size, state, grads), means, index), loss[None]

    return step


def compiled(size: Size, way: Way, micro_batches: int) -> tuple[Callable[..., Any], Any]:
    """The step over all devices, and where its tokens go."""
    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((jax.device_count(),), ("r",), axis_types=(AxisType.Auto,))
    step = (naive_step if way == "naive" else local_step)(size, micro_batches)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("r")), out_specs=(P(), P("r")), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0), NamedSharding(mesh, P("r"))


def run(size: Size, way: Way, micro_batches: int, steps: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of steps, from the second on."""
    import jax
    import numpy as np

    step, sharding = compiled(size, way, micro_batches)
    weights = initial(size)
    zeros = {n: np.zeros_like(w) for n, w in weights.items()}
    state = (weights, zeros, {n: z.copy() for n, z in zeros.items()}, np.float32(0))
    carry: Any = (state, {n: z.copy() for n, z in zeros.items()}, np.float32(0))
    losses, seconds = [], []
    devices = jax.device_count()
    for batch in size.samples(steps):
        # (devices, micro-batches, samples, tokens), and for the naive way cut once more.
        parts = batch.reshape(micro_batches, devices, -1, batch.shape[-1]).swapaxes(0, 1)
        cuts = np.split(parts, micro_batches, 1) if way == "naive" else [parts]
        begin, found = time.perf_counter(), []
        for part in cuts:
            data = jax.make_array_from_callback(part.shape, sharding, lambda i, p=part: p[i])
            carry, loss = step(carry, data)
            found.append(loss)
        jax.block_until_ready(carry)
        seconds.append(time.perf_counter() - begin)
        losses.append(float(np.mean([np.asarray(x.addressable_shards[0].data) for x in found])))
    return losses, seconds[1:]


def main(arguments: list[str]) -> None:
    """Be one of the processes; the first one prints what was measured."""
    import jax

    index, count, port, micro_batches, steps = (int(arguments[i]) for i in (0, 1, 2, 4, 5))
    way: Way = "naive" if arguments[3] == "naive" else "local"
    size = Size(**json.loads(arguments[6]))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{HOST}:{port}"
    jax.distributed.initialize(
        address, count, index, coordinator_bind_address=address if index == 0 else None
    )
    losses, seconds = run(size, way, micro_batches, steps)
    if index == 0:
        tensors = initial(size).values()
        times = micro_batches if way == "naive" else 1
        found = Measured(
            way, count, count, micro_batches, statistics.median(seconds),
            times * (sum(w.nbytes for w in tensors) + 4), times * (len(tensors) + 1), losses,
        )  # fmt: skip
        print(json.dumps(asdict(found)))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
