"""Hugging Face's weights of Llama-shaped models, and ours, with Hugging Face's initial values."""

from __future__ import annotations

from config.llama import LlamaConfig, LlamaModel
from modelling.decoder_weights import decoder_table
from modelling.weights import Weight, WeightRow, WeightTable

NORMS = {
    "before": {"attention": "input_layernorm", "feed_forward": "post_attention_layernorm"},
    "after": {
        "attention_end": "post_attention_layernorm",
        "feed_forward_end": "post_feedforward_layernorm",
    },
    "both": {
        "attention": "input_layernorm",
        "attention_end": "post_attention_layernorm",
        "feed_forward": "pre_feedforward_layernorm",
        "feed_forward_end": "post_feedforward_layernorm",
    },
}
"""Hugging Face's names of the norms of a layer, by our names and by which norms there are."""


def weight_table(config: LlamaConfig) -> WeightTable:
    """The weights of the configured model.

    A head that is tied to the embedding has none of its own.
    """
    model, parts = config.model, config.execution.tensor_parallel
    rows, indices = _Rows(model, parts), range(model.layers)
    words = rows.normal("model.embed_tokens", model.embedding.vocab_size, model.hidden_size)
    logits = rows.normal("lm_head", model.embedding.vocab_size, model.hidden_size)
    layers = [rows.layer(f"model.layers.{i}") for i in indices]
    head = [rows.norm("norm", "model.norm", model.hidden_size)]
    if not model.embedding.tied:
        head.append(_linear("lm_head", logits))
    # Older files hold the frequencies of positions; some a copy of an embedding that is the head.
    ignored = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in indices}
    aliases = {logits.name: words.name} if model.embedding.tied else {}
    names = {"aliases": aliases, "ignored": ignored, "fused": _fused(model)}
    return decoder_table(words, layers, head, parts, **names)


def _fused(model: LlamaModel) -> dict[str, list[str]]:
    """Weights that Phi-3's files have as one, by its name there."""
    if model.architecture != "phi3":
        return {}
    fused = {}
    for i in range(model.layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        fused[f"{attention}.qkv_proj.weight"] = [f"{attention}.{n}_proj.weight" for n in "qkv"]
        fused[f"{mlp}.gate_up_proj.weight"] = [f"{mlp}.{n}_proj.weight" for n in ("gate", "up")]
    return fused


class _Rows:
    """Makes the rows of a layer. `theirs` is Hugging Face's prefix."""

    def __init__(self, model: LlamaModel, tensor_parallel: int) -> None:
        self.model, self.hidden, self.inner = model, model.hidden_size, model.inner_size
        self.attention = model.attention
        self.holders = max(tensor_parallel // model.attention.key_value_heads, 1)

    def layer(self, theirs: str) -> tuple[WeightRow, ...]:
        names = NORMS[self.model.norms]
        norms = [
            self.norm(f"{path}_norm", f"{theirs}.{name}", self.hidden)
            for path, name in names.items()
        ]
        return (*norms, *self.self_attention(theirs), *self.feed_forward(theirs))

    def self_attention(self, layer: str) -> list[WeightRow]:
        a, theirs, holders = self.attention, f"{layer}.self_attn", self.holders
        queries, keys = a.heads * a.head_size, a.key_value_heads * a.head_size
        kv = [f"{theirs}.{kind}_proj" for kind in "kv"]
        projections = [self.normal(name, keys, self.hidden) for name in kv]
        q, o = f"{theirs}.q_proj", f"{theirs}.o_proj"
        rows = [
            _linear("attention.q", self.normal(q, queries, self.hidden)),
            WeightRow.linear("attention.kv", *projections, cut="out", holders=holders),
            WeightRow.linear("attention.output", self.normal(o, self.hidden, queries), cut="in"),
        ]
        if a.input_bias:
            biases = tuple(_bias(name, keys) for name in kv)
            rows.append(WeightRow("attention.q.bias", (_bias(q, queries),), axis=0))
            rows.append(WeightRow("attention.kv.bias", biases, axis=0, holders=holders))
        if a.output_bias:
            rows.append(WeightRow("attention_bias", (_bias(o, self.hidden),)))
        if a.norms == "heads":
            for n in "qk":
                rows.append(self.norm(f"attention.{n}_norm", f"{theirs}.{n}_norm", a.head_size))
        if a.norms == "projections":
            for n, size, by in (("q", queries, 1), ("k", keys, holders)):
                row = self.norm(f"attention.{n}_norm", f"{theirs}.{n}_norm", size)
                rows.append(WeightRow(row.path, row.weights, axis=0, holders=by))
        return rows

    def feed_forward(self, layer: str) -> list[WeightRow]:
        into = [f"{layer}.mlp.{name}_proj" for name in ("gate", "up")]
        down = f"{layer}.mlp.down_proj"
        maps = [self.normal(name, self.inner, self.hidden) for name in into]
        out = self.normal(down, self.hidden, self.inner)
        rows = [
            _linear("feed_forward.wi", *maps),
            WeightRow.linear("feed_forward.wo", out, cut="in"),
        ]
        if self.model.feed_forward_bias:
            biases = tuple(_bias(name, self.inner) for name in into)
            rows.append(WeightRow("feed_forward.wi.bias", biases, axis=0))
            rows.append(WeightRow("feed_forward_bias", (_bias(down, self.hidden),)))
        return rows

    def norm(self, path: str, theirs: str, features: int) -> WeightRow:
        std = 0.0 if self.model.norms_from_one else None
        return WeightRow(f"{path}.weight", (Weight(f"{theirs}.weight", (features,), std),))

    def normal(self, module: str, *shape: int) -> Weight:
        return Weight(f"{module}.weight", shape, self.model.initializer_range)


def _linear(path: str, *weights: Weight) -> WeightRow:
    return WeightRow.linear(path, *weights, cut="out")


def _bias(module: str, features: int) -> Weight:
    return Weight(f"{module}.bias", (features,), 0.0)
