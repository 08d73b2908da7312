"""Hugging Face's weights of T5ForConditionalGeneration and MT5ForConditionalGeneration, and ours.

Initial values are Hugging Face's, too (with initializer_factor 1), which are those of Mesh
TensorFlow.
"""

from __future__ import annotations

from config.t5 import T5Config, T5Model
from modelling.weights import Weight, WeightRow, WeightTable

EMBEDDINGS = "embeddings"
ENCODER_HEAD = "encoder_head"
HEAD = "head"
WORDS, LOGITS = "shared.weight", "lm_head.weight"
ALIASES = {f"{stack}.embed_tokens.weight": WORDS for stack in ("encoder", "decoder")}


def encoder_layer(index: int) -> str:
    """Name of a layer of the encoder."""
    return f"encoder.{index}"


def decoder_layer(index: int) -> str:
    """Name of a layer of the decoder."""
    return f"decoder.{index}"


def weight_table(config: T5Config) -> WeightTable:
    """The weights of the configured model.

    The decoder's embeddings have none of their own, nor has a head that is tied to them, and of
    each stack the first layer alone has relative positions.
    """
    model = config.model
    encoder = tuple(map(encoder_layer, range(model.layers)))
    decoder = tuple(map(decoder_layer, range(model.decoder_depth)))
    phases = {
        "embeddings": (EMBEDDINGS,),
        "first_encoder_layer": encoder[:1],
        "encoder_block": encoder[1:],
        "encoder_head": (ENCODER_HEAD,),
        "first_decoder_layer": decoder[:1],
        "decoder_block": decoder[1:],
        "head": (HEAD,),
    }
    aliases = ALIASES | ({LOGITS: WORDS} if config.tied else {})
    return WeightTable(_layers(model), phases, config.execution.tensor_parallel, aliases)


def _layers(model: T5Model) -> dict[str, tuple[WeightRow, ...]]:
    rows = _Rows(model)
    vocabulary = (model.embedding.vocab_size, model.hidden_size)
    logits = WeightRow.linear("lm_head", Weight(LOGITS, vocabulary, 1.0), cut="out")
    return {
        EMBEDDINGS: (WeightRow("tokens.weight", (Weight(WORDS, vocabulary, 1.0),), axis=0),),
        **{encoder_layer(i): rows.encoder_layer(i) for i in range(model.layers)},
        ENCODER_HEAD: (rows.norm("norm", "encoder.final_layer_norm"),),
        **{decoder_layer(i): rows.decoder_layer(i) for i in range(model.decoder_depth)},
        HEAD: (
            rows.norm("norm", "decoder.final_layer_norm"),
            *([] if model.embedding.tied else [logits]),
        ),
    }


class _Rows:
    """Makes the rows of a model's layers. `path` is ours, `theirs` Hugging Face's prefix."""

    def __init__(self, model: T5Model) -> None:
        self.hidden = model.hidden_size
        self.d_ff = model.d_ff
        self.gated = model.gated
        self.attention = model.attention
        self.inner = model.attention.heads * model.attention.d_kv

    # ---- layers ---------------------------------------------------------------------------------
    def encoder_layer(self, index: int) -> tuple[WeightRow, ...]:
        theirs = f"encoder.block.{index}.layer"
        return self.self_attention(f"{theirs}.0", index) + self.feed_forward(f"{theirs}.1")

    def decoder_layer(self, index: int) -> tuple[WeightRow, ...]:
        theirs = f"decoder.block.{index}.layer"
        return (
            self.self_attention(f"{theirs}.0", index)
            + self.cross_attention(f"{theirs}.1")
            + self.feed_forward(f"{theirs}.2")
        )

    # ---- sub-layers -----------------------------------------------------------------------------
    def self_attention(self, theirs: str, index: int) -> tuple[WeightRow, ...]:
        path, attention = "self_attention", f"{theirs}.SelfAttention"
        rows = [
            self.norm(f"{path}.norm", f"{theirs}.layer_norm"),
            WeightRow.linear(f"{path}.qkv", *self.projections(attention, "q", "k", "v"), cut="out"),
        ]
        if index == 0:
            rows.append(self.relative_position(path, attention))
        return (*rows, self.output(path, attention))

    def cross_attention(self, theirs: str) -> tuple[WeightRow, ...]:
        path, attention = "cross_attention", f"{theirs}.EncDecAttention"
        return (
            self.norm(f"{path}.norm", f"{theirs}.layer_norm"),
            WeightRow.linear(f"{path}.q", *self.projections(attention, "q"), cut="out"),
            WeightRow.linear(f"{path}.kv", *self.projections(attention, "k", "v"), cut="out"),
            self.output(path, attention),
        )

    def feed_forward(self, theirs: str) -> tuple[WeightRow, ...]:
        path, dense = "feed_forward", f"{theirs}.DenseReluDense"
        shape, std = (self.d_ff, self.hidden), self.hidden**-0.5
        names = ("wi_0", "wi_1") if self.gated else ("wi",)
        wi = tuple(Weight(f"{dense}.{name}.weight", shape, std) for name in names)
        wo = Weight(f"{dense}.wo.weight", (self.hidden, self.d_ff), self.d_ff**-0.5)
        return (
            self.norm(f"{path}.norm", f"{theirs}.layer_norm"),
            WeightRow.linear(f"{path}.maps.wi", *wi, cut="out"),
            WeightRow.linear(f"{path}.maps.wo", wo, cut="in"),
        )

    # ---- parts ----------------------------------------------------------------------------------
    def norm(self, path: str, theirs: str) -> WeightRow:
        return WeightRow(f"{path}.weight", (Weight(f"{theirs}.weight", (self.hidden,)),))

    def projections(self, attention: str, *kinds: str) -> tuple[Weight, ...]:
        """Weights of queries, keys, values. Initial queries make up for scores without a scale."""
        d_kv = self.attention.d_kv
        fan_in = {"q": self.hidden * d_kv, "k": self.hidden, "v": self.hidden}
        shape = (self.inner, self.hidden)
        return tuple(Weight(f"{attention}.{k}.weight", shape, fan_in[k] ** -0.5) for k in kinds)

    def output(self, path: str, attention: str) -> WeightRow:
        weight = Weight(f"{attention}.o.weight", (self.hidden, self.inner), self.inner**-0.5)
        return WeightRow.linear(f"{path}.output", weight, cut="in")

    def relative_position(self, path: str, attention: str) -> WeightRow:
        shape = (self.attention.relative_attention_num_buckets, self.attention.heads)
        name = f"{attention}.relative_attention_bias.weight"
        weight = Weight(name, shape, self.hidden**-0.5)
        return WeightRow(f"{path}.relative_position.weight", (weight,), axis=1)
