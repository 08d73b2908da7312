"""Tensors in models' files that are no weights, which transformers passes over."""

from __future__ import annotations

import re

_IGNORED = re.compile(
    r"""
    transformer\.h\.\d+\.attn\.(masked_)?bias               # GPT-J's causal masks
    | (.*\.)?rotary_emb(_local)?\.(.*_)?inv_freq            # frequencies of positions
    | (.*\.)?rotary_emb\.(cos|sin)_cached
    | decoder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight  # T5 of 2019
    | (model\.)?(encoder|decoder)\.version                  # BART's, from fairseq
    """,
    re.VERBOSE,
)


def is_ignored(name: str) -> bool:
    """Whether the tensor of this name in a model's file is no weight: a buffer of an older
    transformers, or a weight that the model does not use."""
    return _IGNORED.fullmatch(name) is not None
