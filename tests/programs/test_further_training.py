"""Programs that train, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.programs import adapters, locations, vision
from tests.programs.digits import CLASSES, PIXELS

rng = np.random.default_rng(0)


def assert_weights(found, expected, rtol=1e-3, atol=1e-5) -> None:
    assert found.keys() == expected.keys()
    for t, wanted in expected.items():
        np.testing.assert_allclose(found[t], wanted, rtol, atol, err_msg=getattr(t, "id", t))


def randomised(model: nn.Module, std: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=std)
    return model


# ---- images -------------------------------------------------------------------------------------
class TorchBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, groups=groups)
        self.norm2 = nn.GroupNorm(2, after)
        self.short = nn.Conv2d(before, after, 1, stride)

    def forward(self, x):
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.short(x)).relu()


class TorchNet(nn.Module):
    def __init__(self):
        super().__init__()
        c = vision.CHANNELS
        self.stem = nn.ModuleDict(
            {"conv": nn.Conv2d(3, c, 3, 2, 1, bias=False), "norm": nn.BatchNorm2d(c)}
        )
        self.blocks = nn.ModuleList([TorchBlock(c, c, 1, 2), TorchBlock(c, 2 * c, 2, 1)])
        self.fc = nn.Linear(2 * c, vision.CLASSES)

    def forward(self, x):
        x = self.stem["norm"](self.stem["conv"](x)).relu()
        x = nn.functional.max_pool2d(x, 3, 1, 1)
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((2, 3)))


def test_a_network_of_images_trains_as_in_torch() -> None:
    torch.manual_seed(0)
    model = TorchNet()
    norm = model.stem["norm"]
    for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        t.data.uniform_(0.5, 1.5)
    model.stem.conv, model.stem.norm = model.stem["conv"], norm
    model.eval()
    shape = (2, vision.BATCH)
    images = rng.normal(size=(*shape, 3, vision.SIZE, vision.SIZE)).astype(np.float32)
    labels = rng.integers(0, vision.CLASSES, shape).astype(np.int32)
    program = vision.Program()
    losses, logits, weights = program.train(model, images, labels)
    trained = [p for n, p in model.named_parameters() if not n.startswith("stem")]
    sgd = torch.optim.SGD(trained, vision.LR, momentum=vision.MOMENTUM)
    for i, (x, y) in enumerate(zip(images, labels, strict=True)):
        out = model(torch.tensor(x))
        loss = nn.functional.cross_entropy(out, torch.tensor(y).long())
        np.testing.assert_allclose(losses[i], loss.item(), rtol=1e-4)
        np.testing.assert_allclose(logits[i], out.detach(), rtol=1e-3, atol=1e-4)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    assert_weights(weights, program.weights(model))


# ---- places of variables ------------------------------------------------------------------------
def torch_descent(weights, xs, ys):
    w = {n: torch.tensor(a, requires_grad=True) for n, a in weights.items()}
    losses = []
    for x, y in zip(torch.tensor(xs), torch.tensor(ys).long(), strict=True):
        h = torch.tanh(x @ w["fc1.weight"] + w["fc1.bias"])
        logits = h @ w["fc2.weight"] + w["fc2.bias"]
        each = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        losses.append(each.reshape(y.shape).mean(1).detach().numpy())
        grads = torch.autograd.grad(each.mean(), list(w.values()))
        with torch.no_grad():
            for t, g in zip(w.values(), grads, strict=True):
                t -= locations.LR * g
    return np.stack(losses), {n: t.detach().numpy() for n, t in w.items()}


@pytest.mark.parametrize(
    "place", ["device", "remote", "remote_sharded", "memory_map", "sharded_inputs"]
)
def test_variables_in_any_place_learn_the_same(place, tmp_path) -> None:
    shape = (2, locations.REPLICAS, locations.BATCH)
    xs = rng.normal(size=(*shape, PIXELS)).astype(np.float32)
    ys = rng.integers(0, CLASSES, shape).astype(np.int32)
    sizes = {"fc1.weight": (PIXELS, 16), "fc1.bias": (16,), "fc2.weight": (16, CLASSES),
             "fc2.bias": (CLASSES,)}  # fmt: skip
    start = {n: rng.normal(0, 0.2, s).astype(np.float32) for n, s in sizes.items()}
    losses, weights = locations.Training(place, str(tmp_path)).train(start, xs, ys)
    expected_losses, expected = torch_descent(start, xs, ys)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    assert_weights(weights, expected)
    if place == "memory_map":
        files = {p.stem: np.load(p) for p in tmp_path.iterdir()}
        assert_weights(files, expected)


# ---- adapters -----------------------------------------------------------------------------------
class TorchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        h = adapters.HIDDEN
        self.ln = nn.LayerNorm(h)
        self.qkv, self.output = nn.Linear(h, 3 * h, False), nn.Linear(h, h, False)
        self.mlp = nn.ModuleList([nn.Linear(h, 4 * h), nn.Linear(4 * h, h)])
        b = adapters.BOTTLENECK
        self.adapter = nn.ModuleDict({"down": nn.Linear(h, b), "up": nn.Linear(b, h)})

    def forward(self, x):
        y = self.ln(x)
        q, k, v = self.qkv(y).chunk(3, -1)
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        m = self.mlp[1](nn.functional.gelu(self.mlp[0](y), approximate="tanh"))
        m = m + self.adapter["up"](self.adapter["down"](m).relu())
        return x + self.output(z) + m


class TorchMagma(nn.Module):
    def __init__(self):
        super().__init__()
        h = adapters.HIDDEN
        self.embedding = nn.Embedding(adapters.VOCAB, h)
        self.prefix = nn.ModuleDict({"proj": nn.Linear(5, h)})
        for i in range(adapters.LAYERS):
            setattr(self, f"layer{i}", TorchLayer())
        self.head = nn.ModuleDict({"ln_f": nn.LayerNorm(h), "lm": nn.Linear(h, adapters.VOCAB)})

    def forward(self, image, words):
        x = torch.cat([self.prefix["proj"](image), self.embedding(words)], 1)
        for i in range(adapters.LAYERS):
            x = getattr(self, f"layer{i}")(x)
        x = x[:, adapters.IMAGE - 1 : -1]
        logits = self.head["lm"](self.head["ln_f"](x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def test_adapters_of_a_frozen_model_train_as_in_torch() -> None:
    model = randomised(TorchMagma())
    shape = (3, adapters.BATCH)
    images = rng.normal(size=(*shape, adapters.IMAGE, 5)).astype(np.float32)
    words = rng.integers(0, adapters.VOCAB, (*shape, adapters.WORDS)).astype(np.int32)
    program = adapters.Magma()
    losses, weights = program.train(model, images, words)
    trained = [p for n, p in model.named_parameters() if "adapter" in n or "prefix" in n]
    adam = torch.optim.Adam(trained, adapters.LR, eps=adapters.EPS)
    for image, ids, found in zip(images, words, losses, strict=True):
        loss = model(torch.tensor(image), torch.tensor(ids).long())
        np.testing.assert_allclose(found, loss.item(), rtol=1e-4)
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert_weights(weights, program.weights(model), rtol=2e-3, atol=1e-4)
