"""Training steps of other programs to compare with: one JAX program, and Hugging Face's in torch.

`JaxTraining` is the program to write where memory suffices: all state on the device, one `jax.jit`
that updates it in place, `lax.scan` over stacked layers, `jax.checkpoint` around each. Products,
attention and the loss have custom gradients, without which XLA's CPU backend takes twice as long.
It supports the architecture `llama` without scaled rotary frequencies, biases or a tied head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from config.sections import Optimizer, RunConfig
from data.samples import IGNORE_INDEX, Batch
from huggingface.torch_model import build_torch_model
from modelling.model_family import get_family

Tree = Any


def is_supported(hf_config: Mapping[str, Any]) -> bool:
    """True if `JaxTraining` computes a model with this config.json."""
    plain = (hf_config.get("rope_parameters") or {}).get("rope_type", "default") == "default"
    options = ("tie_word_embeddings", "attention_bias", "mlp_bias", "rope_scaling")
    return hf_config["model_type"] == "llama" and plain and not any(map(hf_config.get, options))


class JaxTraining:
    """Optimizer steps: the same loss, clipping and AdamW as ours, on one micro-batch.

    Args:
        config: of a model that it `is_supported`.
    """

    def __init__(self, config: RunConfig, weights: Mapping[str, np.ndarray]) -> None:
        family = get_family(config)
        facts = family.to_config_json(config)
        self._weights = _stacked(family.weight_map(config).to_hf(weights))
        self._moments = [jax.tree.map(jnp.zeros_like, self._weights) for _ in range(2)]
        self._step = jax.jit(
            partial(_step, facts, config.training.optimizer), donate_argnums=(0, 1)
        )
        self._number = 0

    def step(self, batch: Batch, learning_rate: float) -> float:
        """One optimizer step; returns the loss before it."""
        self._number += 1
        self._weights, self._moments, loss = self._step(
            self._weights, self._moments, batch["input_ids"], batch["labels"],
            float(self._number), learning_rate,
        )  # fmt: skip
        return float(loss)


def _stacked(files: Mapping[str, np.ndarray]) -> Tree:
    """The weights of a checkpoint of Hugging Face's: those of layers stacked, products' turned, and
    those that are multiplied by the same values put together."""
    prefix = "model.layers."
    count = 1 + max(int(n.split(".")[2]) for n in files if n.startswith(prefix))

    def layers(*names: str) -> jax.Array:
        layers_of_names = [[files[f"{prefix}{i}.{n}.weight"] for n in names] for i in range(count)]
        return jnp.asarray([np.concatenate(one).T for one in layers_of_names])

    attention, feed_forward = "self_attn.{}_proj".format, "mlp.{}_proj".format
    return {
        "embedding": jnp.asarray(files["model.embed_tokens.weight"]),
        "layers": {
            "before": layers("input_layernorm"),
            "qkv": layers(*map(attention, "qkv")),
            "out": layers(attention("o")),
            "between": layers("post_attention_layernorm"),
            "in": layers(feed_forward("gate"), feed_forward("up")),
            "down": layers(feed_forward("down")),
        },
        "norm": jnp.asarray(files["model.norm.weight"]),
        "head": jnp.asarray(files["lm_head.weight"].T),
    }


# ---- what has a gradient of its own -------------------------------------------------------------
@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x (rows, in) times w (in, out)."""
    return x @ w


def _product_gradients(kept: Any, dy: jax.Array) -> Any:
    x, w = kept
    dx = lax.dot_general(dy, w, (((1,), (1,)), ((), ())))
    return dx, lax.dot_general(x, dy, (((0,), (0,)), ((), ())))


_product.defvjp(lambda x, w: (x @ w, (x, w)), _product_gradients)


def _linear(x: jax.Array, w: jax.Array) -> jax.Array:
    return _product(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q (batch, groups, queries, size), k and v (batch, groups, keys, size)."""
    return _attention_kept(q, k, v, mask)[0]


def _attention_kept(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Any:
    scores = jnp.einsum("bgqd,bgkd->bgqk", q, k) + mask
    e = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    scale = 1 / jnp.sum(e, -1, keepdims=True)
    y = jnp.einsum("bgqk,bgkd->bgqd", e, v) * scale
    return y, (q, k, v, e, scale, y)


def _attention_gradients(kept: Any, dy: jax.Array) -> Any:
    q, k, v, e, scale, y = kept
    dy = dy * scale
    products = jnp.einsum("bgqd,bgkd->bgqk", dy, v)
    ds = lax.optimization_barrier(e * (products - jnp.sum(dy * y, -1, keepdims=True)))

    def over_queries(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.optimization_barrier(jnp.einsum("bgqd,bgqk->bgdk", a, b)).swapaxes(2, 3)

    return jnp.einsum("bgqk,bgkd->bgqd", ds, k), over_queries(q, ds), over_queries(dy, e), None


_attention.defvjp(_attention_kept, _attention_gradients)


@jax.custom_vjp
def _losses(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum of the weighted cross-entropies; logits (rows, words)."""
    return _losses_kept(logits, labels, weights)[0]


def _losses_kept(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Any:
    most = jnp.max(logits, -1)
    total = jnp.log(jnp.sum(jnp.exp(logits - most[:, None]), -1)) + most
    target = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jnp.sum((total - target) * weights), (logits, labels, weights, total)


def _losses_gradients(kept: Any, dy: jax.Array) -> Any:
    logits, labels, weights, total = kept
    target = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels[:, None]
    return (dy * weights)[:, None] * (jnp.exp(logits - total[:, None]) - target), None, None


_losses.defvjp(_losses_kept, _losses_gradients)


# ---- the model ----------------------------------------------------------------------------------
def _normed(facts: Mapping[str, Any], x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = jnp.mean(jnp.square(x), -1, keepdims=True)
    return x * lax.rsqrt(mean + facts["rms_norm_eps"]) * scale


def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary positions: x (batch, tokens, heads, size), cos and sin (tokens, 1, size)."""
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def _angles(facts: Mapping[str, Any], tokens: int, size: int) -> tuple[jax.Array, jax.Array]:
    rope = facts.get("rope_parameters") or facts
    frequencies = rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
    angles = np.tile(np.arange(tokens)[:, None, None] * frequencies, 2)
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def _layer(facts: Mapping[str, Any], x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
    batch, tokens, _ = x.shape
    heads, groups = facts["num_attention_heads"], facts["num_key_value_heads"]
    size = facts.get("head_dim") or facts["hidden_size"] // heads
    angles = _angles(facts, tokens, size)
    qkv = _linear(_normed(facts, x, w["before"]), w["qkv"]).reshape(batch, tokens, -1, size)
    q, k, v = jnp.split(qkv, [heads, heads + groups], 2)
    q, k, v = _turned(q, *angles) * size**-0.5, _turned(k, *angles), v
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    q = q.transpose(0, 2, 1, 3).reshape(batch, groups, -1, size)  # heads of a group in a row
    mask = np.tile(np.where(np.tri(tokens, dtype=bool), 0, np.float32(-1e30)), (heads // groups, 1))
    mixed = _attention(q, k, v, mask).reshape(batch, heads, tokens, size).transpose(0, 2, 1, 3)
    x += _linear(mixed.reshape(batch, tokens, -1), w["out"])
    gate, up = jnp.split(_linear(_normed(facts, x, w["between"]), w["in"]), 2, -1)
    return x + _linear(jax.nn.silu(gate) * up, w["down"]), None


def _loss(facts: Mapping[str, Any], weights: Tree, words: jax.Array, labels: jax.Array) -> Any:
    x = weights["embedding"][words]
    layer = jax.checkpoint(partial(_layer, facts))
    x, _ = lax.scan(layer, x, weights["layers"])
    logits = _linear(_normed(facts, x, weights["norm"]), weights["head"])
    labels = labels.reshape(-1)
    counts = labels != IGNORE_INDEX
    words = jnp.where(counts, labels, 0)
    total = _losses(logits.reshape(len(labels), -1), words, counts.astype(jnp.float32))
    return total / jnp.sum(counts)


# ---- the optimizer ------------------------------------------------------------------------------
def _step(
    facts: Mapping[str, Any],
    optimizer: Any,
    weights: Tree,
    moments: list[Tree],
    words: jax.Array,
    labels: jax.Array,
    number: float,
    rate: float,
) -> tuple[Tree, list[Tree], jax.Array]:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) after clipping by the global norm."""
    loss, gradients = jax.value_and_grad(partial(_loss, facts))(weights, words, labels)
    if optimizer.gradient_clipping is not None:
        squares = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients))
        scale = jnp.minimum(1.0, optimizer.gradient_clipping / (jnp.sqrt(squares) + 1e-6))
        gradients = jax.tree.map(lambda g: g * scale, gradients)
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, moments[0], gradients)
    second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, moments[1], gradients)

    def updated(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        m, v = m / (1 - beta1**number), v / (1 - beta2**number)
        return w - rate * (m / (jnp.sqrt(v) + optimizer.eps) + optimizer.weight_decay * w)

    return jax.tree.map(updated, weights, first, second), [first, second], loss


class TorchTraining:
    """Optimizer steps: the same loss, clipping and AdamW as ours, on one micro-batch.

    Args:
        checkpointing: compute each layer's activations again in the backward pass.
    """

    def __init__(
        self, config: RunConfig, weights: Mapping[str, np.ndarray], checkpointing: bool
    ) -> None:
        family = get_family(config)
        files = family.weight_map(config).to_hf(weights)
        self.model = build_torch_model(family.to_config_json(config), config.model.precision, files)
        if checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
            self.model.train()  # checkpointing works in this mode only; dropout is 0
            for module in self.model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        optimizer = config.training.optimizer
        self.clip = optimizer.gradient_clipping
        self.optimizer = torch.optim.AdamW(
            _decayed_apart(self.model, optimizer),
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            foreach=True,
        )

    def step(self, batch: Batch, learning_rate: float) -> float:
        """One optimizer step; returns the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean over the target tokens. Labels stand where they are predicted, for all families."""
        arrays = {n: torch.from_numpy(np.ascontiguousarray(a)).long() for n, a in batch.items()}
        labels = arrays.pop("labels")
        if "segment_ids" in arrays:  # of one text each: a mask of its tokens
            arrays["attention_mask"] = arrays.pop("segment_ids")
        logits = self.model(**arrays, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
        )


def _decayed_apart(model: Any, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Parameters in two groups: vectors, such as norms' scales, have no weight decay."""
    parameters = list(model.parameters())
    return [
        {
            "params": [p for p in parameters if (p.ndim > 1) == decayed],
            "weight_decay": optimizer.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
