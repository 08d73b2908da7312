"""Examples of placement and sharding, compared with NumPy and torch."""

from __future__ import annotations

import numpy as np
import torch

from examples import phased, remote_rts, tensor_parallel


def f32(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_step_with_a_sharded_remote_variable() -> None:
    w, xs = f32(3, 5), f32(4, 6, 3, seed=1)  # 15 elements on four replicas: the last part is padded
    grad = np.mean([x.T @ (x @ w) for x in xs.astype(np.float64)], axis=0)
    np.testing.assert_allclose(remote_rts.matrix_step(w, xs, 0.1), w - 0.1 * grad, rtol=1e-4)


def test_layers_in_remote_memory_train_as_in_torch() -> None:
    xs = f32(4, 2, 6)
    before, after, outputs = remote_rts.layers_step(xs, layers=3, lr=0.05)
    weights = [torch.tensor(w, dtype=torch.float64, requires_grad=True) for w in before]
    y = torch.tensor(xs, dtype=torch.float64)
    for w in weights:
        y = y @ w
    np.testing.assert_allclose(outputs, y.detach().numpy(), rtol=1e-4, atol=1e-5)
    ((y**2).sum() / 2 / len(xs)).backward()
    for w, found in zip(weights, after, strict=True):
        np.testing.assert_allclose(found, (w - 0.05 * w.grad).detach(), rtol=1e-4, atol=1e-6)


def test_phased_step_is_a_step_on_the_whole_batch() -> None:
    sizes = phased.Sizes()
    shape = (sizes.micro_batches, sizes.replicas, sizes.rows, sizes.hidden)
    xs, targets = f32(*shape), f32(*shape, seed=1)
    losses, before, after = phased.train_step(xs, targets, sizes)

    layers = [{n: torch.tensor(w, requires_grad=True) for n, w in p.items()} for p in before]
    y = torch.tensor(xs)
    for layer in layers:
        z = y @ layer["linear.weight"] + layer["linear.bias"]
        y = y + torch.nn.functional.gelu(z, approximate="tanh")
    each = ((y - torch.tensor(targets)) ** 2).mean((2, 3))
    each.mean().backward()
    np.testing.assert_allclose(losses, each.detach(), rtol=1e-4)
    for layer, found in zip(layers, after, strict=True):
        for name, w in layer.items():
            expected = (w - sizes.lr * w.grad).detach()
            np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_tensor_parallel_layer_is_the_whole_layer() -> None:
    tp, dp, rows, hidden, inner = 2, 2, 3, 4, 8
    weights = {
        "up.weight": f32(hidden, inner),
        "up.bias": f32(inner, seed=1),
        "down.weight": f32(inner, hidden, seed=2),
        "bias": f32(hidden, seed=3),
    }
    x, dy = f32(dp, rows, hidden, seed=4), f32(dp, rows, hidden, seed=5)
    y, dx, dws = tensor_parallel.run(x, dy, weights, tp)

    t = {n: torch.tensor(w, requires_grad=True) for n, w in weights.items()}
    x_t = torch.tensor(x, requires_grad=True)
    z = torch.nn.functional.gelu(x_t @ t["up.weight"] + t["up.bias"], approximate="tanh")
    out = x_t + z @ t["down.weight"] + t["bias"]
    out.backward(torch.tensor(dy))
    for replica in range(dp * tp):
        np.testing.assert_allclose(y[replica], out[replica // tp].detach(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(dx[replica], x_t.grad[replica // tp], rtol=1e-4, atol=1e-5)
    axes = {"up.weight": -1, "up.bias": -1, "down.weight": 0}
    for name, w in t.items():
        shards = [w.grad] * tp if name not in axes else w.grad.chunk(tp, axes[name])
        for replica in range(dp * tp):
            expected = shards[replica % tp]
            np.testing.assert_allclose(dws[name][replica], expected, rtol=1e-4, atol=1e-5)
