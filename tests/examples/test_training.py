"""Examples that train on digits, compared with torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from examples import checkpoint, data_parallel, mnist, pipelined, sessions
from examples.digits import CLASSES, PIXELS, digits


def torch_net(weights: dict[str, np.ndarray]) -> torch.nn.Module:
    """`mnist.Net` in torch, with weights by our names."""
    gelu = torch.nn.GELU(approximate="tanh")
    sizes = (PIXELS, 48), (48, 32)
    layers = [layer for a, b in sizes for layer in (torch.nn.Linear(a, b), gelu)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(32, CLASSES, bias=False))
    ours = {"fc1": net[0], "fc2": net[2], "head": net[4]}
    for name, value in weights.items():
        layer, _, kind = name.rpartition(".")
        getattr(ours[layer], kind).data = torch.tensor(value.T.copy())
    return net


def named_parameters(net: torch.nn.Module) -> dict[str, np.ndarray]:
    found = {}
    for name, layer in (("fc1", net[0]), ("fc2", net[2]), ("head", net[4])):
        for kind, p in layer.named_parameters():
            found[f"{name}.{kind}"] = p.detach().numpy().T
    return found


def initial_weights() -> dict[str, np.ndarray]:
    """Returns the initial weights of `mnist.Net`."""
    return mnist.train(0)[1]


def torch_training(steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    net = torch_net(initial_weights())
    adam = torch.optim.AdamW(net.parameters(), mnist.LEARNING_RATE, eps=1e-5, weight_decay=0.01)
    images, labels = map(torch.tensor, digits(steps * mnist.BATCH))
    losses = []
    for x, y in zip(images.split(mnist.BATCH), labels.long().split(mnist.BATCH), strict=True):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses, named_parameters(net)


def assert_same_weights(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_training_with_an_optimizer_module_is_torch_s() -> None:
    losses, weights = mnist.train(12)
    expected, expected_weights = torch_training(12)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_same_weights(weights, expected_weights)


def test_training_learns_and_its_weights_serve_another_program() -> None:
    losses, weights = mnist.train(120)
    assert losses[-10:].mean() < 1
    images, labels = digits(300, seed=1)
    ours = mnist.predict(weights, images)
    theirs = torch_net(weights)(torch.tensor(images)).argmax(-1).numpy()
    assert (ours == theirs).mean() > 0.99
    assert (ours == labels).mean() > 0.7


def test_data_parallel_training_is_training_on_the_whole_batch() -> None:
    expected, expected_weights = torch_training(5)
    losses, weights = data_parallel.train(data_parallel.REPLICAS, 5)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_same_weights(weights, expected_weights)


def test_groups_of_replicas_train_models_of_their_own() -> None:
    rng = np.random.default_rng(0)
    xs, ys = rng.normal(size=(6, 4, 5, 3)).astype("f4"), rng.normal(size=(6, 4, 5)).astype("f4")
    found = data_parallel.train_ensemble(xs, ys, lr=0.1)
    for model, replicas in enumerate([(0, 2), (1, 3)]):
        w = np.zeros(3)
        for x, y in zip(xs[:, replicas], ys[:, replicas], strict=True):
            x, y = x.reshape(-1, 3), y.ravel()
            w -= 0.1 * (x @ w - y) @ x / len(y)
        np.testing.assert_allclose(found[model], w, rtol=1e-4, atol=1e-6)


def test_pipeline_accumulates_the_gradient_of_the_whole_batch() -> None:
    shape = (4, pipelined.MICRO_BATCH)
    images, labels = digits(4 * pipelined.MICRO_BATCH)
    losses, weights, grads = pipelined.run(images.reshape(*shape, PIXELS), labels.reshape(shape))
    net = torch_net({name.partition(".")[2]: w for name, w in weights.items()})
    each = torch.nn.functional.cross_entropy(
        net(torch.tensor(images)), torch.tensor(labels).long(), reduction="none"
    )
    each.mean().backward()
    np.testing.assert_allclose(losses, each.detach().numpy().reshape(shape).mean(1), rtol=1e-4)
    assert grads.pop("stage0.mean_accum_counter") == grads.pop("stage1.mean_accum_counter") == 4
    layers = {"stage0.accum.fc1": net[0], "stage1.accum.fc2": net[2], "stage1.accum.head": net[4]}
    for name, grad in grads.items():
        layer, _, kind = name.rpartition(".")
        expected = getattr(layers[layer], kind).grad.numpy().T
        np.testing.assert_allclose(grad, expected, rtol=1e-3, atol=1e-6, err_msg=name)


def test_checkpoint_continues_bit_for_bit(tmp_path) -> None:
    whole = checkpoint.run_steps(checkpoint.training_session(), range(6))
    assert checkpoint.interrupted(str(tmp_path / "step3"), 6, at=3) == whole


def test_evaluation_session_follows_the_training_session() -> None:
    accuracies = sessions.train_and_evaluate(rounds=2, steps=40)
    assert accuracies[0] < accuracies[1]
    assert accuracies[1] == pytest.approx(_torch_accuracy(80), abs=0.03)


def _torch_accuracy(steps: int) -> float:
    images, labels = digits(200, seed=1)
    found = torch_net(torch_training(steps)[1])(torch.tensor(images)).argmax(-1).numpy()
    return float((found == labels).mean())
