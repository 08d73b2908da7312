"""Negative log-likelihood. Torch's takes logarithms, with the classes on axis 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from popxl import ops
from tests.popxl.ops.harness import OpRecord, ints, rand

LOGITS, LABELS = rand(3, 4, 5), ints(3, 4, high=5)
PROBS = torch.softmax(torch.tensor(LOGITS), -1).numpy()
ITSELF = "it returns the gradient itself"
IGNORED = int(LABELS[0, 0])


def _reference(reduction, ignore=-100, log=True):
    def loss(p, labels):
        rows = p.reshape(-1, p.shape[-1])
        out = F.nll_loss(rows.log() if log else rows, labels.flatten(), None, None, ignore, None,
                         reduction)  # fmt: skip
        return out.reshape(labels.shape) if reduction == "none" else out

    return loss


def _with_grad(reduction, scale=1.0, ignore=-100):
    """Torch differentiates through the softmax whose output the op gets."""

    def both(probs, labels, *_):
        logits = probs.detach().log().requires_grad_()
        loss = F.cross_entropy(logits.reshape(-1, 5), labels.flatten(), ignore_index=ignore,
                               reduction=reduction)  # fmt: skip
        (dx,) = torch.autograd.grad(loss.sum() * scale, [logits])
        return loss.detach().reshape(labels.shape if reduction == "none" else ()), dx

    return both


def _fused(name, build, reference, inputs=(PROBS, LABELS), dtypes=("float32", "float16")):
    return OpRecord(f"nll_loss_with_softmax_grad{name}", build, list(inputs), reference, dtypes,
                    False, ITSELF)  # fmt: skip


RECORDS = [
    OpRecord("nll_loss", ops.nll_loss, [PROBS, LABELS], _reference("mean")),
    OpRecord("nll_loss_sum", lambda p, l: ops.nll_loss(p, l, reduction="sum"), [PROBS, LABELS],
             _reference("sum")),
    OpRecord("nll_loss_none", lambda p, l: ops.nll_loss(p, l, reduction="none"), [PROBS, LABELS],
             _reference("none")),
    OpRecord("nll_loss_ignore", lambda p, l: ops.nll_loss(p, l, IGNORED), [PROBS, LABELS],
             _reference("mean", IGNORED)),
    OpRecord("nll_loss_log", lambda p, l: ops.nll_loss(p, l, log_prob=True), [LOGITS, LABELS],
             _reference("mean", log=False)),
    _fused("", ops.nll_loss_with_softmax_grad, _with_grad("mean"),
           dtypes=("float32", "float16", "bfloat16")),
    _fused("_scaled", lambda p, l: ops.nll_loss_with_softmax_grad(p, l, 64, IGNORED),
           _with_grad("mean", 64, IGNORED)),
    _fused("_tensor", lambda p, l, g: ops.nll_loss_with_softmax_grad(p, l, g, reduction="sum"),
           _with_grad("sum", float(rand(seed=9))), [PROBS, LABELS, rand(seed=9)], ("float32",)),
    _fused("_none", lambda p, l: ops.nll_loss_with_softmax_grad(p, l, reduction="none"),
           _with_grad("none")),
    _fused("_rows", lambda p, l: ops.nll_loss_with_softmax_grad(p, l, reduction="none"),
           _with_grad("none"), [PROBS, LABELS.reshape(2, 6)]),
]  # fmt: skip
