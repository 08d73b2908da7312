"""A Llama's training step as one program of JAX: how fast XLA is without our engine.

What somebody would write who has the memory: all state on the device, one `jax.jit` that changes it
in place, `lax.scan` over stacked layers, `jax.checkpoint` around each. For the architecture `llama`
without scaled rotary frequencies, biases or a tied head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from config.errors import UserError
from config.sections import RunConfig
from data.samples import Batch
from modelling.layers.lm_head import IGNORED
from modelling.spec import family_of

Tree = Any


class JaxTraining:
    """Optimizer steps: the same loss, clipping and AdamW as ours, on one micro-batch."""

    def __init__(self, config: RunConfig, weights: Mapping[str, np.ndarray]) -> None:
        family = family_of(config)
        facts = family.to_config_json(config)
        if facts["model_type"] != "llama" or facts.get("tie_word_embeddings"):
            raise UserError(
                "JAX's own training step is written for Llamas with a head of their own"
            )
        self._weights = _stacked(family.weights(config).for_files(weights))
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
        found = [[files[f"{prefix}{i}.{n}.weight"] for n in names] for i in range(count)]
        return jnp.asarray([np.concatenate(one).T for one in found])

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
    qkv = (_normed(facts, x, w["before"]) @ w["qkv"]).reshape(batch, tokens, -1, size)
    q, k, v = jnp.split(qkv, [heads, heads + groups], 2)
    mixed = jax.nn.dot_product_attention(
        _turned(q, *angles), _turned(k, *angles), v, is_causal=True
    )
    x += mixed.reshape(batch, tokens, -1) @ w["out"]
    gate, up = jnp.split(_normed(facts, x, w["between"]) @ w["in"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ w["down"], None


def _loss(facts: Mapping[str, Any], weights: Tree, words: jax.Array, labels: jax.Array) -> Any:
    x = weights["embedding"][words]
    layer = jax.checkpoint(partial(_layer, facts))
    x, _ = lax.scan(layer, x, weights["layers"])
    logits = _normed(facts, x, weights["norm"]) @ weights["head"]
    counts = labels != IGNORED
    target = jnp.take_along_axis(logits, jnp.where(counts, labels, 0)[..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(logits, -1) - target
    return jnp.sum(jnp.where(counts, losses, 0.0)) / jnp.sum(counts)


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
