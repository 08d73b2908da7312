"""Reference training steps in one JAX program, and with Hugging Face's model in torch.

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
    """Returns True if `JaxTraining` implements the model of a config.json."""
    plain = (hf_config.get("rope_parameters") or {}).get("rope_type", "default") == "default"
    options = ("tie_word_embeddings", "attention_bias", "mlp_bias", "rope_scaling")
    return hf_config["model_type"] == "llama" and plain and not any(map(hf_config.get, options))


class JaxTraining:
    """Reference in plain JAX: optimizer steps with this program's loss, clipping and AdamW.

    Args:
        config: of a model that it `is_supported`.
    """

    def __init__(self, config: RunConfig, weights: Mapping[str, np.ndarray]) -> None:
        family = get_family(config)
        hf_config = family.to_config_json(config)
        self._weights = _stack_layers(family.weight_map(config).to_hf(weights))
        self._moments = [jax.tree.map(jnp.zeros_like, self._weights) for _ in range(2)]
        self._step = jax.jit(
            partial(_step, hf_config, config.training.optimizer), donate_argnums=(0, 1)
        )
        self._number = 0

    def step(self, batch: Batch, learning_rate: float) -> float:
        """Run one optimizer step in JAX; returns the loss before the update."""
        self._number += 1
        self._weights, self._moments, loss = self._step(
            self._weights, self._moments, batch["input_ids"], batch["labels"],
            float(self._number), learning_rate,
        )  # fmt: skip
        return float(loss)


def _stack_layers(files: Mapping[str, np.ndarray]) -> Tree:
    """Returns Hugging Face weights as a tree of arrays stacked over layers.

    Linear weights are transposed, and those with the same input are concatenated.
    """
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
def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Matrix product: (rows, in) @ (in, out) -> (rows, out)."""
    return x @ w


def _matmul_bwd(residuals: Any, dy: jax.Array) -> Any:
    x, w = residuals
    dx = lax.dot_general(dy, w, (((1,), (1,)), ((), ())))
    return dx, lax.dot_general(x, dy, (((0,), (0,)), ((), ())))


_matmul.defvjp(lambda x, w: (x @ w, (x, w)), _matmul_bwd)


def _linear(x: jax.Array, w: jax.Array) -> jax.Array:
    return _matmul(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention: q (batch, groups, queries, size), k, v (batch, groups, keys, size) -> like q."""
    return _attention_fwd(q, k, v, mask)[0]


def _attention_fwd(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Any:
    scores = jnp.einsum("bgqd,bgkd->bgqk", q, k) + mask
    e = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    scale = 1 / jnp.sum(e, -1, keepdims=True)
    y = jnp.einsum("bgqk,bgkd->bgqd", e, v) * scale
    return y, (q, k, v, e, scale, y)


def _attention_bwd(residuals: Any, dy: jax.Array) -> Any:
    q, k, v, e, scale, y = residuals
    dy = dy * scale
    products = jnp.einsum("bgqd,bgkd->bgqk", dy, v)
    ds = lax.optimization_barrier(e * (products - jnp.sum(dy * y, -1, keepdims=True)))

    def over_queries(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.optimization_barrier(jnp.einsum("bgqd,bgqk->bgdk", a, b)).swapaxes(2, 3)

    return jnp.einsum("bgqk,bgkd->bgqd", ds, k), over_queries(q, ds), over_queries(dy, e), None


_attention.defvjp(_attention_fwd, _attention_bwd)


@jax.custom_vjp
def _weighted_cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the weighted sum of token cross-entropies; logits (rows, vocabulary)."""
    return _weighted_cross_entropy_fwd(logits, labels, weights)[0]


def _weighted_cross_entropy_fwd(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Any:
    max_logit = jnp.max(logits, -1)
    total = jnp.log(jnp.sum(jnp.exp(logits - max_logit[:, None]), -1)) + max_logit
    target = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jnp.sum((total - target) * weights), (logits, labels, weights, total)


def _weighted_cross_entropy_bwd(residuals: Any, dy: jax.Array) -> Any:
    logits, labels, weights, total = residuals
    target = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels[:, None]
    return (dy * weights)[:, None] * (jnp.exp(logits - total[:, None]) - target), None, None


_weighted_cross_entropy.defvjp(_weighted_cross_entropy_fwd, _weighted_cross_entropy_bwd)


# ---- the model ----------------------------------------------------------------------------------
def _rms_norm(hf_config: Mapping[str, Any], x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = jnp.mean(jnp.square(x), -1, keepdims=True)
    return x * lax.rsqrt(mean + hf_config["rms_norm_eps"]) * scale


def _apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply RoPE: x (batch, tokens, heads, size), cos and sin (tokens, 1, size) -> like x."""
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def _rope_cos_sin(
    hf_config: Mapping[str, Any], tokens: int, size: int
) -> tuple[jax.Array, jax.Array]:
    rope = hf_config.get("rope_parameters") or hf_config
    frequencies = rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
    angles = np.tile(np.arange(tokens)[:, None, None] * frequencies, 2)
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def _layer(hf_config: Mapping[str, Any], x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
    batch, tokens, _ = x.shape
    heads, groups = hf_config["num_attention_heads"], hf_config["num_key_value_heads"]
    size = hf_config.get("head_dim") or hf_config["hidden_size"] // heads
    angles = _rope_cos_sin(hf_config, tokens, size)
    qkv = _linear(_rms_norm(hf_config, x, w["before"]), w["qkv"]).reshape(batch, tokens, -1, size)
    q, k, v = jnp.split(qkv, [heads, heads + groups], 2)
    q, k, v = _apply_rope(q, *angles) * size**-0.5, _apply_rope(k, *angles), v
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    q = q.transpose(0, 2, 1, 3).reshape(batch, groups, -1, size)  # heads of a group in a row
    mask = np.tile(np.where(np.tri(tokens, dtype=bool), 0, np.float32(-1e30)), (heads // groups, 1))
    mixed = _attention(q, k, v, mask).reshape(batch, heads, tokens, size).transpose(0, 2, 1, 3)
    x += _linear(mixed.reshape(batch, tokens, -1), w["out"])
    gate, up = jnp.split(_linear(_rms_norm(hf_config, x, w["between"]), w["in"]), 2, -1)
    return x + _linear(jax.nn.silu(gate) * up, w["down"]), None


def _loss(
    hf_config: Mapping[str, Any], weights: Tree, input_ids: jax.Array, labels: jax.Array
) -> Any:
    x = weights["embedding"][input_ids]
    layer = jax.checkpoint(partial(_layer, hf_config))
    x, _ = lax.scan(layer, x, weights["layers"])
    logits = _linear(_rms_norm(hf_config, x, weights["norm"]), weights["head"])
    labels = labels.reshape(-1)
    counts = labels != IGNORE_INDEX
    input_ids = jnp.where(counts, labels, 0)
    total = _weighted_cross_entropy(
        logits.reshape(len(labels), -1), input_ids, counts.astype(jnp.float32)
    )
    return total / jnp.sum(counts)


# ---- the optimizer ------------------------------------------------------------------------------
def _step(
    hf_config: Mapping[str, Any],
    optimizer: Any,
    weights: Tree,
    moments: list[Tree],
    input_ids: jax.Array,
    labels: jax.Array,
    step_number: float,
    lr: float,
) -> tuple[Tree, list[Tree], jax.Array]:
    """Returns updated weights and moments, and the loss: clipping by global norm, then AdamW.

    AdamW: Loshchilov and Hutter, arXiv:1711.05101.
    """
    loss, gradients = jax.value_and_grad(partial(_loss, hf_config))(weights, input_ids, labels)
    if optimizer.gradient_clipping is not None:
        squares = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients))
        scale = jnp.minimum(1.0, optimizer.gradient_clipping / (jnp.sqrt(squares) + 1e-6))
        gradients = jax.tree.map(lambda g: g * scale, gradients)
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, moments[0], gradients)
    second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, moments[1], gradients)

    def update_weight(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        m, v = m / (1 - beta1**step_number), v / (1 - beta2**step_number)
        return w - lr * (m / (jnp.sqrt(v) + optimizer.eps) + optimizer.weight_decay * w)

    return jax.tree.map(update_weight, weights, first, second), [first, second], loss


class TorchTraining:
    """Reference in torch: optimizer steps with this program's loss, clipping and AdamW.

    Args:
        checkpointing: recompute each layer's activations in the backward pass.
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
            _parameter_groups(self.model, optimizer),
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            foreach=True,
        )

    def step(self, batch: Batch, learning_rate: float) -> float:
        """Run one optimizer step in torch; returns the loss before the update."""
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
        """Returns the mean loss over target tokens; labels are already shifted."""
        arrays = {n: torch.from_numpy(np.ascontiguousarray(a)).long() for n, a in batch.items()}
        labels = arrays.pop("labels")
        if "segment_ids" in arrays:  # of one text each: a mask of its tokens
            arrays["attention_mask"] = arrays.pop("segment_ids")
        logits = self.model(**arrays, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
        )


def _parameter_groups(model: Any, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns torch's two parameter groups: matrices with weight decay, vectors without."""
    parameters = list(model.parameters())
    return [
        {
            "params": [p for p in parameters if (p.ndim > 1) == has_decay],
            "weight_decay": optimizer.weight_decay if has_decay else 0.0,
        }
        for has_decay in (True, False)
    ]
