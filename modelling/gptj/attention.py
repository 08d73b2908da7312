"""GPT-J's attention: causal, with queries and keys rotated by their positions.

Su et al., arXiv:2104.09864. Neighbouring features of a head are the pairs that are rotated, and
only the first `rotary_dim` features are.
"""

from __future__ import annotations

from config.gptj import GPTJConfig, GPTJModel
from modelling.layers import (
    AttentionHeads,
    FusedLinear,
    Groups,
    Scores,
    Tables,
    heads_first,
    places_in_texts,
    tables_of_texts,
)
from popxl import Tensor
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants


def rotary_tables(model: GPTJModel, positions: int) -> Tables:
    """The angles of positions 0, 1, ..."""
    attention = model.attention
    base = attention.rotary_positional_embeddings_base
    return trig_table_constants(positions, attention.rotary_dim, base)


class SelfAttention(AttentionHeads):
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

    def build(self, x: Tensor, seed: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> this replica's part of the sum, of the same shape."""
        return self.read(x, seed, starts)[0]

    def read(
        self, x: Tensor, seed: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `build`, and the rotated keys and the values, (batch, heads, length, head_size)."""
        tables = tables_of_texts(rotary_tables(self.model, self.axes.length(x)), starts)
        q, k, v = self.project(x, tables)
        places = () if starts is None else places_in_texts(starts)
        return self.merge(self.attend(q, k, v, seed=seed, places=places)), k, v

    def project(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: (batch, heads, length, head_size) each."""
        q, k, v = map(self.of_heads, self.qkv(x))
        rotary_dim = self.model.attention.rotary_dim
        q, k = (rotary_pos_embed(t, *tables, rotary_dim) for t in (q, k))
        return heads_first(q), heads_first(k), heads_first(v)
