"""Training examples, compared with torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from examples import (
    adapters,
    attention_gradient,
    fp8_training,
    locations,
    recurrent,
    task,
    vision,
)
from examples.digits import CLASSES, PIXELS

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
        files = {
            p.stem: np.fromfile(p, np.float32).reshape(sizes[p.stem])
            for p in tmp_path.iterdir()
            if p.name != "arrays.json"
        }
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


# ---- float8 -------------------------------------------------------------------------------------
def rounded_to_float8(t: torch.Tensor, dtype, largest: float) -> torch.Tensor:
    """Round to float8 with the scale at which the largest element just fits."""
    scale = torch.floor(torch.log2(largest / t.abs().max())).item()
    return (t * 2.0**scale).to(dtype).float() * 2.0**-scale


def as_half(t: torch.Tensor) -> torch.Tensor:
    """Round to float16, the dtype of float8 products."""
    return t.half().float()


class Linear8(torch.autograd.Function):
    """Products of operands in float8: 4 bits of exponent forwards, 5 for gradients."""

    @staticmethod
    def forward(ctx, x, w):
        # ml_dtypes' and torch's fnuz formats are those of the IPU (Noune et al., 2022).
        x, w = (rounded_to_float8(t, torch.float8_e4m3fnuz, 240.0) for t in (x, w))
        ctx.save_for_backward(x, w)
        return as_half(x @ w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = rounded_to_float8(dy, torch.float8_e5m2fnuz, 57344.0)
        return as_half(dy @ w.T), as_half(x.T @ dy)


def torch_in_float8(
    w: dict[str, torch.Tensor], x: torch.Tensor, product=Linear8.apply
) -> torch.Tensor:
    for i in range(2):
        p = f"blocks.{i}"
        y = nn.functional.layer_norm(x, x.shape[-1:], w[f"{p}.norm.weight"], w[f"{p}.norm.bias"])
        y = (product(y, w[f"{p}.up.weight"]) + w[f"{p}.up.bias"]).relu()
        x = x + product(y, w[f"{p}.down.weight"]) + w[f"{p}.down.bias"]
    return product(x, w["head.weight"])


@pytest.mark.slow  # tests/popxl_addons/test_fp8.py has the layer
def test_training_in_float8_rounds_as_torch_does() -> None:
    c, rng = fp8_training, np.random.default_rng(8)
    program = c.Program()
    shapes = {n: t.shape for n, t in program.variables.to_dict().items()}
    weights = {n: rng.normal(0, 0.5, s).astype(np.float32) for n, s in shapes.items()}
    labels = rng.integers(0, c.CLASSES, (1, c.BATCH)).repeat(20, 0).astype(np.int32)
    xs = rng.normal(size=(1, c.BATCH, c.FEATURES)).repeat(20, 0).astype(np.float32)
    losses, grads = program.train(weights, xs, labels)
    w = {n: torch.tensor(a, requires_grad=True) for n, a in weights.items()}
    logits = torch_in_float8(w, torch.tensor(xs[0]))
    loss = nn.functional.cross_entropy(logits, torch.tensor(labels[0]).long())
    # A last bit of a normalisation may turn how an element is rounded, which float8 shows.
    np.testing.assert_allclose(losses[0], loss.item(), rtol=1e-3)
    expected = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
    in_float32 = torch_in_float8(w, torch.tensor(xs[0]), torch.matmul)
    plain_loss = nn.functional.cross_entropy(in_float32, torch.tensor(labels[0]).long())
    plain = dict(zip(w, torch.autograd.grad(plain_loss, list(w.values())), strict=True))
    assert grads.keys() == expected.keys()
    for name, g in grads.items():
        np.testing.assert_allclose(g, expected[name], rtol=2e-2, atol=2e-3, err_msg=name)
        ours = np.abs(g - expected[name].numpy()).max()
        rounding = (plain[name] - expected[name]).abs().max().item()
        assert ours < rounding / 10, name
    assert losses[-1] < losses[0] / 2


# ---- loops --------------------------------------------------------------------------------------
def test_a_recurrent_network_s_gradients_are_torch_s() -> None:
    c = recurrent
    embedding, head = randomised(nn.Embedding(c.VOCAB, c.HIDDEN)), nn.Linear(c.HIDDEN, c.VOCAB)
    gru = randomised(nn.GRU(c.HIDDEN, c.HIDDEN, num_layers=2, batch_first=True), 0.5)

    def by_name(value) -> dict[str, np.ndarray]:
        out = {"embedding.weight": value(embedding.weight)}
        for i in range(2):
            for ours, theirs in (("x", "ih"), ("h", "hh")):
                name = f"layers.{i}.cell.{ours}"
                out[f"{name}.weight"] = value(getattr(gru, f"weight_{theirs}_l{i}")).T
                out[f"{name}.bias"] = value(getattr(gru, f"bias_{theirs}_l{i}"))
        return out | {"head.weight": value(head.weight).T, "head.bias": value(head.bias)}

    words = rng.integers(0, c.VOCAB, (2, c.BATCH, c.LENGTH)).astype(np.int32)
    loss, grads = c.loss_and_gradients(by_name(lambda p: p.detach().numpy()), *words)
    logits = head(gru(embedding(torch.tensor(words[0]).long()))[0])
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(words[1]).long().flatten()
    )
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    assert_weights(grads, by_name(lambda p: p.grad.numpy()), rtol=1e-3, atol=1e-6)


# ---- gradients written by hand ------------------------------------------------------------------
def torch_attention(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    c = attention_gradient
    later = torch.triu(torch.full((c.LENGTH, c.LENGTH), -torch.inf), 1)
    for name in ("first", "second"):
        p = {n.partition(".")[2]: t for n, t in w.items() if n.startswith(name)}
        y = nn.functional.layer_norm(x, x.shape[-1:], p["ln.weight"], p["ln.bias"])
        qkv = (y @ p["qkv.weight"] + p["qkv.bias"]).chunk(3, -1)
        q, k, v = (t.reshape(c.BATCH, c.LENGTH, c.HEADS, c.SIZE).transpose(1, 2) for t in qkv)
        bias = p["attention.bias"] + later
        z = nn.functional.scaled_dot_product_attention(q, k, v, bias[None])
        x = x + z.transpose(1, 2).flatten(2) @ p["output.weight"] + p["output.bias"]
    return (x * x).mean()


def test_attention_with_its_own_gradient_is_torch_s() -> None:
    c, h, steps = attention_gradient, attention_gradient.HIDDEN, 3
    shapes = {"ln.weight": (h,), "ln.bias": (h,), "qkv.weight": (h, 3 * h), "qkv.bias": (3 * h,),
              "output.weight": (h, h), "output.bias": (h,),
              "attention.bias": (c.HEADS, c.LENGTH, c.LENGTH)}  # fmt: skip
    weights = {
        f"{layer}.{n}": rng.normal(0, 0.5, s).astype(np.float32)
        for layer in ("first", "second")
        for n, s in shapes.items()
    }
    x = rng.normal(size=(steps, c.BATCH, c.LENGTH, h)).astype(np.float32)
    losses, grads = c.loss_and_gradients(weights, x, steps)
    w = {n: torch.tensor(a, requires_grad=True) for n, a in weights.items()}
    expected = [torch_attention(w, torch.tensor(a)) for a in x]
    np.testing.assert_allclose(losses, [loss.item() for loss in expected], rtol=1e-5)
    wanted = torch.autograd.grad(sum(expected) / steps, list(w.values()))
    assert_weights(grads, dict(zip(w, wanted, strict=True)), rtol=1e-3, atol=1e-6)


# ---- tasks --------------------------------------------------------------------------------------
class TorchTask(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.fc1, self.norm = nn.Linear(PIXELS, 24), nn.LayerNorm(24)
        self.fc2 = nn.Linear(24, CLASSES)
        for name, p in self.named_parameters():
            data = torch.tensor(weights[f"fwd.{name}"])
            p.data = data.T.clone() if p.ndim == 2 else data

    def forward(self, x):
        y = nn.functional.gelu(self.fc1(x), approximate="tanh")
        return self.fc2(self.norm(y))


def test_a_task_s_training_is_torch_s() -> None:
    session = task.training_session(dropout=0.0)
    session.dataloader = task.Loader(64)
    start = {n: a.copy() for n, a in session.get_named_tensors_data().to_dict().items()}
    model = TorchTask(start)
    found = task.train(session, 6)
    adam = torch.optim.AdamW(model.parameters(), eps=1e-6, weight_decay=0.01)
    loader = task.Loader(64)
    for step, (loss, norm) in enumerate(found):
        image, label = next(loader)
        expected = nn.functional.cross_entropy(
            model(torch.tensor(image)), torch.tensor(label).long()
        )
        adam.param_groups[0]["lr"] = task.learning_rate(step)
        adam.zero_grad()
        expected.backward()
        whole = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        np.testing.assert_allclose((loss, norm), (expected.item(), whole), rtol=2e-3)
        adam.step()
    final = session.get_named_tensors_data().fwd.to_dict()
    named = {n: p.detach().numpy() for n, p in model.named_parameters()}
    wanted = {n: a.T if a.ndim == 2 else a for n, a in named.items()}
    assert_weights(final, wanted, rtol=1e-2, atol=1e-3)


def test_a_task_goes_on_where_its_checkpoint_stopped(tmp_path) -> None:
    """With dropout and a learning rate by step: seeds, steps, data and moments are all saved."""
    whole = task.training_session()
    whole.dataloader = task.Loader(64)
    expected = task.train(whole, 6)

    first = task.training_session(max_checkpoints=1)
    first.dataloader = task.Loader(64)
    found = task.train(first, 2)
    first.save_checkpoint(str(tmp_path / "step2"))
    found += task.train(first, 1)
    first.save_checkpoint(str(tmp_path / "step3"))
    assert [p.name for p in tmp_path.iterdir()] == ["step3"]
    del first

    second = task.training_session()
    second.dataloader = task.Loader(64)
    second.load_checkpoint(str(tmp_path / "step3"), report_missing="error")
    assert second.session_state["steps"] == 3
    assert found + task.train(second, 3) == expected

    held_out = task.accuracy(second, task.Loader(64, seed=1), 4)
    assert held_out == task.accuracy(whole, task.Loader(64, seed=1), 4)
    assert 0 < held_out < 1
