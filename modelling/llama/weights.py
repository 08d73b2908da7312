"""Hugging Face's weights of Llama-shaped models, and ours, with Hugging Face's initial values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from config.llama import LlamaConfig, LlamaModel
from modelling.decoder_weights import decoder_table
from modelling.weights import Stacked, Weight, WeightRow, WeightTable

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
    rows, indices = _Rows(model, parts, config.execution.expert_parallel), range(model.layers)
    words = rows.normal("model.embed_tokens", model.embedding.vocab_size, model.hidden_size)
    logits = rows.normal("lm_head", model.embedding.vocab_size, model.hidden_size)
    layers: list[Sequence[WeightRow]] = [rows.layer(f"model.layers.{i}") for i in indices]
    groups = []
    if config.execution.expert_groups > 1:
        groups = [_groups(layer, config.execution.expert_groups) for layer in layers]
        layers = [[row for row in layer if not _of_experts(row)] for layer in layers]
    head = [rows.norm("norm", "model.norm", model.hidden_size)]
    if not model.embedding.tied:
        head.append(_linear("lm_head", logits))
    # Some files hold a copy of an embedding that is the head.
    aliases = {logits.name: words.name} if model.embedding.tied else {}
    names = {"aliases": aliases, "fused": _fused(model)}
    if model.experts.count:
        mixtures = [Mixture(model, f"model.layers.{i}") for i in indices]
        names["stacked"] = {n: x for m in mixtures for n, x in m.stacked.items()}
        aliases |= {m.alias: m.router for m in mixtures if m.alias != m.router}
    return decoder_table(words, layers, head, parts, groups, **names)


def _groups(layer: Sequence[WeightRow], count: int) -> list[list[WeightRow]]:
    """The rows of a layer's experts, for so many groups of them."""
    rows = list(filter(_of_experts, layer))
    return [[row.of_experts(g, count) for row in rows] for g in range(count)]


def _of_experts(row: WeightRow) -> bool:
    return row.path.startswith(("feed_forward.wi.", "feed_forward.wo."))


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


class Mixture:
    """Hugging Face's names of a layer's experts.

    Attributes:
        module: of router and experts.
        router: the router's weight; `alias`: another name of it.
        into, out: modules of each expert's maps: gate and up, and down.
        stacked: what older and newer files have in place of all experts' maps, by its name.
    """

    def __init__(self, model: LlamaModel, layer: str) -> None:
        old, oss = (model.architecture == kind for kind in ("mixtral", "gpt_oss"))
        self.module = f"{layer}.{'block_sparse_moe' if old else 'mlp'}"
        gate, up, down = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
        each = [f"{self.module}.experts.{e}" for e in range(model.experts.count)]
        self.router = f"{self.module}.{'router' if oss else 'gate'}.weight"
        self.alias = self.router if oss else f"{layer}.mlp.gate.weight"
        self.into = [(f"{expert}.{gate}", f"{expert}.{up}") for expert in each]
        self.out = [f"{expert}.{down}" for expert in each]
        self.stacked: dict[str, Stacked] = {}
        for kind in ("weight", "bias")[: 1 + model.experts.biases]:
            end = "_bias" if kind == "bias" else ""
            into = tuple(tuple(f"{name}.{kind}" for name in names) for names in self.into)
            out = tuple((f"{name}.{kind}",) for name in self.out)
            turned = oss and kind == "weight"
            self.stacked |= {
                f"{layer}.mlp.experts.gate_up_proj{end}": Stacked(into, oss, turned, oss),
                f"{layer}.mlp.experts.down_proj{end}": Stacked(out, False, turned, oss),
            }


class _Rows:
    """Makes the rows of a layer. `theirs` is Hugging Face's prefix."""

    def __init__(self, model: LlamaModel, tensor_parallel: int, expert_parallel: bool) -> None:
        self.expert_parallel = expert_parallel
        self.model, self.hidden, self.inner = model, model.hidden_size, model.inner_size
        self.attention = model.attention
        self.holders = max(tensor_parallel // model.attention.key_value_heads, 1)

    def layer(self, theirs: str) -> tuple[WeightRow, ...]:
        names = NORMS[self.model.norms]
        norms = [
            self.norm(f"{path}_norm", f"{theirs}.{name}", self.hidden)
            for path, name in names.items()
        ]
        inside = self.experts if self.model.experts.count else self.feed_forward
        return (*norms, *self.self_attention(theirs), *inside(theirs))

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
        if a.sinks:
            sinks = Weight(f"{theirs}.sinks", (a.heads,), self.model.initializer_range)
            rows.append(WeightRow("attention.sinks", (sinks,), axis=0))
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

    def experts(self, layer: str) -> list[WeightRow]:
        theirs, path = Mixture(self.model, layer), "feed_forward"
        count, shared = self.model.experts.count, self.model.experts.shared_size
        into = [self.normal(n, self.inner, self.hidden) for names in theirs.into for n in names]
        out = [self.normal(name, self.hidden, self.inner) for name in theirs.out]
        router = self.normal(theirs.router.removesuffix(".weight"), count, self.hidden)
        rows = [
            WeightRow(f"{path}.router.weight", (router,)),
            self._cut(f"{path}.wi.weight", tuple(into), experts=count),
            self._cut(f"{path}.wo.weight", tuple(out), transpose=True, experts=count),
        ]
        if self.model.experts.biases:
            rows += self._biases(theirs, path)
        if shared is not None:
            gate = self.normal(f"{theirs.module}.shared_expert_gate", 1, self.hidden)
            rows.append(WeightRow(f"{path}.shared_gate.weight", (gate,)))
            rows += self._gated(f"{path}.shared", f"{theirs.module}.shared_expert", shared)
        return rows

    def _cut(self, path: str, weights: tuple[Weight, ...], **fields: Any) -> WeightRow:
        """A row of all experts, each cut, or the whole ones shared out."""
        return WeightRow(path, weights, axis=0, shared_out=self.expert_parallel, **fields)

    def _biases(self, theirs: Mixture, path: str) -> list[WeightRow]:
        """The biases of the router and the experts."""
        module, count = theirs.router.removesuffix(".weight"), self.model.experts.count
        router = Weight(f"{module}.bias", (count,), self.model.initializer_range)
        into = tuple(_bias(name, self.inner) for names in theirs.into for name in names)
        out = tuple(_bias(name, self.hidden) for name in theirs.out)
        return [
            WeightRow(f"{path}.router.bias", (router,)),
            self._cut(f"{path}.wi.bias", into),
            WeightRow(f"{path}.wo.bias", out, axis=0, cut=False),
        ]

    def _gated(self, path: str, theirs: str, inner: int) -> list[WeightRow]:
        maps = [self.normal(f"{theirs}.{n}_proj", inner, self.hidden) for n in ("gate", "up")]
        out = self.normal(f"{theirs}.down_proj", self.hidden, inner)
        return [_linear(f"{path}.wi", *maps), WeightRow.linear(f"{path}.wo", out, cut="in")]

    def feed_forward(self, layer: str) -> list[WeightRow]:
        into = [f"{layer}.mlp.{name}_proj" for name in ("gate", "up")]
        down = f"{layer}.mlp.down_proj"
        rows = self._gated("feed_forward", f"{layer}.mlp", self.inner)
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
