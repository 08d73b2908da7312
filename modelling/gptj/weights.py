"""Hugging Face's weights of GPTJForCausalLM, and ours. Initial values are Hugging Face's, too."""

from __future__ import annotations

from config.gptj import GPTJConfig, GPTJModel
from modelling.decoder_weights import decoder_table
from modelling.weights import Weight, WeightRow, WeightTable


def weight_table(config: GPTJConfig) -> WeightTable:
    """The weights of the configured model."""
    model = config.model
    indices = range(model.layers)
    hidden, vocabulary = model.hidden_size, model.embedding.vocab_size
    table = (vocabulary, hidden)
    words, logits = (_normal(name, table, model) for name in ("transformer.wte", "lm_head"))
    layers = [_layer(model, f"transformer.h.{i}") for i in indices]
    head = (
        *_norm("norm", "transformer.ln_f", hidden),
        WeightRow.linear("lm_head", logits, cut="out"),
        WeightRow("lm_head.bias", (_bias("lm_head", vocabulary),), axis=0),
    )
    return decoder_table(words, layers, head, config.execution.tensor_parallel)


def _layer(model: GPTJModel, theirs: str) -> tuple[WeightRow, ...]:
    hidden, inner = model.hidden_size, model.inner_size
    attention, mlp = f"{theirs}.attn", f"{theirs}.mlp"
    square = (hidden, hidden)
    projections = (_normal(f"{attention}.{kind}_proj", square, model) for kind in "qkv")
    fc_in, fc_out = f"{mlp}.fc_in", f"{mlp}.fc_out"
    return (
        *_norm("norm", f"{theirs}.ln_1", hidden),
        WeightRow.linear("attention.qkv", *projections, cut="out"),
        WeightRow.linear(
            "attention.output", _normal(f"{attention}.out_proj", square, model), cut="in"
        ),
        WeightRow.linear("feed_forward.wi", _normal(fc_in, (inner, hidden), model), cut="out"),
        WeightRow("feed_forward.wi.bias", (_bias(fc_in, inner),), axis=0),
        WeightRow.linear("feed_forward.wo", _normal(fc_out, (hidden, inner), model), cut="in"),
        WeightRow("feed_forward_bias", (_bias(fc_out, hidden),)),
    )


def _norm(path: str, theirs: str, features: int) -> tuple[WeightRow, WeightRow]:
    scale = Weight(f"{theirs}.weight", (features,))
    return WeightRow(f"{path}.weight", (scale,)), WeightRow(
        f"{path}.bias", (_bias(theirs, features),)
    )


def _normal(module: str, shape: tuple[int, ...], model: GPTJModel) -> Weight:
    return Weight(f"{module}.weight", shape, model.initializer_range)


def _bias(module: str, features: int) -> Weight:
    return Weight(f"{module}.bias", (features,), 0.0)
