"""A minimal decoder: causal attention without positions, and feed-forward layers."""

from __future__ import annotations

from config.toy import ToyConfig, ToyModel
from modelling import layers as nn
from modelling.decoder import DecoderSpec
from modelling.model_family import decoder_family
from popxl import Tensor, ops


class Attention(nn.MultiHeadAttention):
    def __init__(self, c: ToyModel) -> None:
        super().__init__(c.heads, nn.AttentionSpec((c.hidden_size // c.heads) ** -0.5, causal=True))
        self.qkv = nn.FusedLinear(c.hidden_size, c.hidden_size, {"q": 0.2, "k": 0.2, "v": 0.2})
        self.o = nn.Linear(c.hidden_size, c.hidden_size, shard="in", std=0.2)

    def build(self, x: Tensor, ctx: nn.BlockContext) -> Tensor:
        q, k, v = (self.split_heads(t) for t in self.qkv(self.groups.copy_to_tp(x)))
        return self.o(self.attend(q, k, v, ctx))


class MLP(nn.Module):
    def __init__(self, c: ToyModel) -> None:
        super().__init__()
        self.up = nn.Linear(c.hidden_size, 4 * c.hidden_size, shard="out", std=0.2)
        self.down = nn.Linear(4 * c.hidden_size, c.hidden_size, shard="in", std=0.2)

    def build(self, x: Tensor) -> Tensor:
        return self.down(ops.gelu(self.up(self.groups.copy_to_tp(x))))


class Block(nn.Module):
    def __init__(self, c: ToyModel) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.RMSNorm(c.hidden_size, 1e-6) for _ in range(2))
        self.attn, self.mlp = Attention(c), MLP(c)

    def build(self, x: Tensor, ctx: nn.BlockContext) -> Tensor:
        x = ctx.add_residual(x, self.attn(self.ln_1(x), ctx))
        return ctx.add_residual(x, self.mlp(self.ln_2(x)))


def decoder_spec(config: ToyConfig) -> DecoderSpec:
    c = config.model
    return DecoderSpec(
        embeddings=lambda: nn.Embeddings(nn.VocabularyEmbedding(0.2, "embed")),
        layer_types=["full_attention"] * c.layers,
        block=lambda layer_type: Block(c),
        head=lambda: nn.LMHeadLoss(nn.RMSNorm(c.hidden_size, 1e-6), "norm", 0.2),
        hf_layers="h",
    )


FAMILY = decoder_family(decoder_spec, "modelling.toy.config_json")
