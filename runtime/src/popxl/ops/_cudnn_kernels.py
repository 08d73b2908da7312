"""cuDNN's attention kernels, with the statistics of the softmax between forward and backward pass.

The gradient of `jax.nn.dot_product_attention` has to run the forward kernel again, for statistics
that only JAX's private module of these kernels gives. Where that has not the functions that this
was written for, `jax.nn` is called, and the statistics are zeros that nothing reads.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_GRADS_PARAMETERS = (
    "scale seed dropout_rate variadic_args mask_type layout sliding_window_length is_training "
    "return_residual res grad_output"
).split()


class KernelMask(NamedTuple):
    """Scale of the scores, what is added to them, and what the kernel hides itself.

    Attributes:
        bias: in 16 bits, (1 or batch, 1 or heads, queries, keys); None: nothing.
        has_bias_grad: true if the gradient of `bias` is needed.
        window: of causal attention; None: all keys up to the query's.
        lengths: int32 (batch,), of the keys; None: all.
    """

    scale: float
    bias: Any = None
    has_bias_grad: bool = False
    causal: bool = False
    window: tuple[int, int] | None = None
    lengths: Any = None


def is_installed() -> bool:
    """True if JAX finds cuDNN."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn.cuda_versions is not None


@cache
def keeps_statistics() -> bool:
    """True if JAX's private module has the kernels' functions as they are called here."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    grads = getattr(cudnn, "_dot_product_attention_bwd_rule", None)
    return grads is not None and [*inspect.signature(grads).parameters] == _GRADS_PARAMETERS


def run_forward(q: Any, k: Any, v: Any, mask: KernelMask) -> tuple[Any, Any]:
    """Runs the forward kernel.

    Args:
        q, k, v: (batch, tokens, heads, features).

    Returns:
        The output, and float32 (batch, heads, queries): the logarithm of the sum of each query's
        exponentials.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    out, statistics = cudnn.dot_product_attention(
        q, k, v,
        bias=mask.bias,
        q_seqlen=_query_lengths(q, mask),
        kv_seqlen=mask.lengths,
        scale=mask.scale,
        mask_type=_mask_type(mask),
        sliding_window_length=_num_visible(mask),
        return_residual=True,
    )  # fmt: skip
    return out, statistics


def run_backward(
    dy: Any, q: Any, k: Any, v: Any, out: Any, statistics: Any, mask: KernelMask
) -> tuple[Any, Any, Any, Any]:
    """Runs the backward kernel; returns the gradients of q, k, v, and of the bias or None.

    Args:
        out, statistics: results of `run_forward`.

    Raises:
        NotImplementedError: JAX refuses the forward kernel on the device at hand.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    jax.eval_shape(lambda: run_forward(q, k, v, mask))
    unused = jnp.zeros(0, q.dtype)
    inputs = (mask.bias, _query_lengths(q, mask), mask.lengths, None, None, None, None)
    optional = (unused if t is None else t for t in inputs)
    dq, dk, dv, d_bias, *_ = cudnn._dot_product_attention_bwd_rule(
        mask.scale, 0, 0.0,
        (mask.bias is not None, mask.has_bias_grad),
        _mask_type(mask), cudnn.AttentionLayout.BTNH.value, _num_visible(mask), True, False,
        (q, k, v, *optional, statistics, out),
        dy,
    )  # fmt: skip
    return dq, dk, dv, d_bias


def run_forward_of_jax(q: Any, k: Any, v: Any, mask: KernelMask) -> Any:
    """Runs the forward kernel by JAX's public function, which `jax.vjp` can differentiate."""
    return jax.nn.dot_product_attention(
        q, k, v,
        bias=mask.bias,
        scale=mask.scale,
        is_causal=mask.causal,
        key_value_seq_lengths=mask.lengths,
        local_window_size=mask.window,
        implementation="cudnn",
    )  # fmt: skip


def _mask_type(mask: KernelMask) -> Any:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    if mask.lengths is None:
        return MaskType.CAUSAL if mask.causal else MaskType.NO_MASK
    return MaskType.PADDING_CAUSAL if mask.causal else MaskType.PADDING


def _query_lengths(q: Any, mask: KernelMask) -> Any:
    return None if mask.lengths is None else jnp.full(q.shape[:1], q.shape[1], jnp.int32)


def _num_visible(mask: KernelMask) -> int | None:
    return None if mask.window is None else mask.window[0] + 1
