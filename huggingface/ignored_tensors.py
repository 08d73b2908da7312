"""Tensors in model files that are not weights of the model; transformers ignores them too."""

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


def is_ignored_tensor(name: str) -> bool:
    """True if a tensor is not a weight: a buffer of an old version, or unused by the model."""
    return _IGNORED.fullmatch(name) is not None
