"""Scaled dot-product attention with masks; the projections are elsewhere.

Shapes: b samples, h heads on this replica, g KV heads on this replica, q queries, k keys, d
    features
of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import popxl
import popxl_addons as addons
from modelling.layers.dropout import Dropout
from popxl import Tensor, ops

QUERIES = 2
"""Axis of the queries in q (b, h, q, d) and in scores (b, h, q, k)."""


@dataclass(frozen=True)
class AttentionSpec:
    """Settings of attention scores: scale, causal mask, window, soft cap, sinks.

    Attributes:
        scale: factor on q @ k.
        softcap: scores become softcap * tanh(scores / softcap); None: no cap.
        causal: True if queries see only keys at positions up to their own.
        window: of causal attention, number of positions that a query sees, its own included; or a
            pair of those before and those after it, see `popxl.ops.attention`; None: all.
        has_sinks: True if the last bias has attention sinks (h,), see `popxl.ops.attention`.
    """

    scale: float = 1.0
    softcap: float | None = None
    causal: bool = False
    window: int | tuple[int, int] | None = None
    has_sinks: bool = False

    def without_causal_mask(self) -> AttentionSpec:
        """Returns the settings of attention to later tokens, too, as with is_causal false."""
        window = (self.window, self.window) if isinstance(self.window, int) else self.window
        return replace(self, causal=False, window=window)

    @property
    def compares_positions(self) -> bool:
        """True if attention depends on token positions (causal mask or window)."""
        return self.causal or self.window is not None


DEFAULT_ATTENTION = AttentionSpec()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Splits features into heads: (b, s, h * d) -> (b, s, h, d)."""
    batch, length, features = x.shape
    return x.reshape((batch, length, heads, features // heads))


def transpose_heads(x: Tensor) -> Tensor:
    """Swaps sequence and heads: (b, s, h, d) -> (b, h, s, d), and back."""
    return x.transpose((0, 2, 1, 3))


def merge_heads(x: Tensor) -> Tensor:
    """Joins heads to features: (b, h, s, d) -> (b, s, h * d)."""
    batch, heads, length, features = x.shape
    return transpose_heads(x).reshape((batch, length, heads * features))


def qk_ids_in_order(num_queries: int, num_keys: int) -> list[Tensor]:
    """Returns position ids 0, 1, ... of queries and keys: int32 (1, queries), (1, keys)."""
    return [
        popxl.constant(np.arange(n)[None], popxl.int32, "positions")
        for n in (num_queries, num_keys)
    ]


def packed_qk_ids(segment_starts: Tensor) -> list[Tensor]:
    """Returns position ids and segment ids of queries and keys in packed samples.

    Args:
        segment_starts: int32 (batch, length), the index in its sample at which each token's
            sequence starts; it serves as segment id.

    Returns:
        int32 (1, length) twice, (batch, length) twice, see `Attention.build`.
    """
    length = segment_starts.shape[1]
    return [*qk_ids_in_order(length, length), segment_starts, segment_starts]


class Attention(addons.Module):
    """Attention output softmax(scores + biases) v, for all queries at once or chunk by chunk.

    Scores and softmax are in float32, whatever the dtype of q, k and v: scores without a scale, as
    in T5, need it.

    Args:
        dropout: of the probabilities.
        spec: how scores are computed.
        num_chunks: chunks of the queries, see `ChunkLoop`; 1: all queries at once.
        differentiable: True if there will be a backward pass.
        fused: see `popxl.ops.attention`.
    """

    def __init__(
        self,
        dropout: Dropout,
        spec: AttentionSpec = DEFAULT_ATTENTION,
        num_chunks: int = 1,
        differentiable: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.spec, self.num_chunks = dropout, spec, num_chunks
        self.differentiable, self.fused = differentiable, fused

    def build(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: Sequence[Tensor] = (),
        seed: Tensor | None = None,
        qk_ids: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attends from all queries to all keys: q (b, h, q, d), k, v (b, g, k, d) -> (b, h, q, d).

        Args:
            biases: float32, added to the scores; they broadcast to (b, h, q, k). Sinks are the
                last.
            seed: uint32 (2,) for dropout.
            qk_ids: int32 (b or 1, q) and (b or 1, k) in turn: position ids of queries and of keys,
                if these decide what is seen; then their segment ids, if samples are packed.
                Default: one segment, in order.
            lengths: int32 (b,), the number of keys of each sample; those after it are padding.
                Chunked attention takes no lengths.
        """
        if self.differentiable:
            q, k, v = map(self._mark_saved, (q, k, v))
        floats, queries = [q, k, v, *biases], q.shape[QUERIES]
        if queries == 1:  # in generation
            return self._attend(floats, qk_ids, seed, lengths, fused=False)
        if self.num_chunks == 1:
            return self._attend(floats, qk_ids, seed, lengths, self.fused, in_order=True)
        if queries % self.num_chunks:
            raise ValueError(
                f"{queries} queries cannot be split into {self.num_chunks} equal chunks: choose a "
                "number of chunks that divides them"
            )
        from modelling.layers.chunk_loop import ChunkLoop

        if self.spec.compares_positions and not qk_ids:
            qk_ids = qk_ids_in_order(queries, k.shape[2])

        def attend_chunk(inputs: Sequence[Tensor], seed: Tensor | None) -> Tensor:
            floats_of_chunk, ids = inputs[: len(floats)], inputs[len(floats) :]
            return self._attend(floats_of_chunk, ids, seed, fused=False)

        has_queries = [b.rank > QUERIES and b.shape[QUERIES] == queries for b in biases]
        bias_axes = (QUERIES if chunked else None for chunked in has_queries)
        id_axes = (None if number % 2 else 1 for number in range(len(qk_ids)))
        axes = [QUERIES, None, None, *bias_axes, *id_axes]
        loop = ChunkLoop(attend_chunk, self.num_chunks, axes, len(floats), QUERIES)
        call = self.call_module(loop, autodiff="auto" if self.differentiable else "none")
        return call([*floats, *qk_ids], seed)[0]

    def _attend(
        self,
        qkv_and_biases: Sequence[Tensor],
        qk_ids: Sequence[Tensor],
        seed: Tensor | None,
        lengths: Tensor | None = None,
        fused: bool | None = None,
        in_order: bool = False,
    ) -> Tensor:
        """Attends from the queries of a chunk to all keys; arguments as for `build`.

        Args:
            qkv_and_biases: q, k, v and the biases.
            in_order: True if the position ids of packed samples are 0, 1, ..., as kernels assume.
        """
        (q, k, v, *biases), spec = qkv_and_biases, self.spec
        pairs = [(qk_ids[i], qk_ids[i + 1]) for i in range(0, len(qk_ids), 2)]
        positions = pairs.pop(0) if pairs and spec.compares_positions else None
        segments = pairs.pop() if pairs else None
        sinks = biases.pop() if spec.has_sinks else None
        seed, probability = self.dropout.op_arguments(seed)
        return ops.attention(
            q,
            k,
            v,
            biases,
            spec.scale,
            seed,
            probability,
            causal=spec.causal,
            window=spec.window,
            cap=spec.softcap,
            positions=None if segments is not None and in_order else positions,
            segments=segments,
            lengths=lengths,
            sinks=sinks,
            fused=fused,
        )

    def _mark_saved(self, x: Tensor) -> Tensor:
        """Marks x as saved for the backward pass, in the layout that its kernel reads fastest.

        cuDNN's kernel takes (b, s, h, d), as projections produce it; a loop over tiles takes
        (b, h, s, d).
        """
        if not self.fused or x.shape[2] == 1:
            return ops.materialise(x)
        return transpose_heads(ops.materialise(transpose_heads(x)))
