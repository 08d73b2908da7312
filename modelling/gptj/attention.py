"""GPT-J's attention: causal, with queries and keys rotated by their positions.

Su et al., arXiv:2104.09864. Neighbouring features of a head are the pairs that are rotated, and
only the first `rotary_dim` features are.
"""

from __future__ import annotations

from config.gptj import GPTJConfig, GPTJModel
from modelling.layers import DecoderAttention, FusedLinear, Groups, Scores, Tables, heads_first
from popxl import Tensor
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants


def rotary_tables(model: GPTJModel, positions: int) -> Tables:
    """The angles of positions 0, 1, ..."""
    attention = model.attention
    base = attention.rotary_positional_embeddings_base
    return trig_table_constants(positions, attention.rotary_dim, base)


class SelfAttention(DecoderAttention):
    """This replica's heads, inside a sharded computation.

    Variables: `qkv.weight` (hidden, 3 * features on a replica), `output.weight`.
    """

    def __init__(self, config: GPTJConfig, groups: Groups) -> None:
        model = config.model
        super().__init__(
            config,
            groups,
            model.attention.heads,
            model.head_size,
            Scores(model.head_size**-0.5, causal=True),
            slices=config.execution.attention_serialisation,
        )
        self.model = model
        self.qkv = FusedLinear(self.features, 3, groups.sharded, self.group_size)

    def tables(self, positions: int) -> Tables:
        """See `DecoderAttention`."""
        return rotary_tables(self.model, positions)

    def project(self, x: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderAttention`."""
        assert tables is not None
        q, k, v = map(self.of_heads, self.qkv(x))
        rotary_dim = self.model.attention.rotary_dim
        q, k = (rotary_pos_embed(t, *tables, rotary_dim) for t in (q, k))
        return heads_first(q), heads_first(k), heads_first(v)
