"""Resizing. The reference of roi_align is written from the paper's definition, in loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F

from popxl import ops
from tests.popxl.ops.harness import OpRecord, rand

X = rand(2, 3, 4, 5)
UP, DOWN = (1.0, 1.0, 2.0, 3.0), (1.0, 1.0, 0.5, 0.6)
ROIS = np.array([[0.5, 1.0, 6.0, 7.0], [-3.0, -4.0, 2.0, 12.0], [4.0, 4.0, 4.2, 4.3]], np.float32)
IMAGES = np.array([1, 0, 1], np.int32)


def _resize(name, scale, mode, torch_mode, nearest="floor", where="half_pixel", corners=None,
            dtypes=("float32",)):  # fmt: skip
    def build(t):
        return ops.interpolate(t, scale, mode, nearest, where)

    def reference(t):
        size = [math.floor(n * s) for n, s in zip(t.shape[2:], scale[2:], strict=True)]
        return F.interpolate(t, size, mode=torch_mode, align_corners=corners)

    return OpRecord(f"interpolate_{name}", build, [X], reference, dtypes, tolerance=2,
                    why="cubic weights cancel")  # fmt: skip


def _bilinear(image, y, x):
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return torch.zeros(image.shape[0], dtype=image.dtype)
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    dy, dx = y - top, x - left
    upper = image[:, top, left] * (1 - dx) + image[:, top, right] * dx
    lower = image[:, bottom, left] * (1 - dx) + image[:, bottom, right] * dx
    return upper * (1 - dy) + lower * dy


def _roi_align(size, scale, samples):
    def reference(t, rois, images):
        out = []
        for (x1, y1, x2, y2), i in zip((rois.detach() * scale).tolist(), images, strict=True):
            step = max(y2 - y1, 1) / size[0], max(x2 - x1, 1) / size[1]
            for p, q in itertools.product(range(size[0]), range(size[1])):
                offsets = [(k + 0.5) / samples for k in range(samples)]
                points = [
                    _bilinear(t[i], y1 + (p + u) * step[0], x1 + (q + v) * step[1])
                    for u, v in itertools.product(offsets, offsets)
                ]
                out.append(torch.stack(points).mean(0))
        return torch.stack(out).reshape(len(images), *size, -1).permute(0, 3, 1, 2)

    return reference


RECORDS = [
    _resize("nearest", UP, "nearest", "nearest", where="asymmetric", dtypes=("float32", "float16")),
    _resize("nearest_down", DOWN, "nearest", "nearest-exact", "round_prefer_ceil"),
    _resize("linear", UP, "linear", "bilinear", corners=False, dtypes=("float32", "float16")),
    _resize("linear_corners", UP, "linear", "bilinear", where="align_corners", corners=True),
    _resize("linear_pytorch", DOWN, "linear", "bilinear", where="pytorch_half_pixel",
            corners=False),
    _resize("cubic", UP, "cubic", "bicubic", corners=False),
    _resize("cubic_corners", UP, "cubic", "bicubic", where="align_corners", corners=True),
    OpRecord("interpolate_default", ops.interpolate, [X], lambda t: t),
    OpRecord("roi_align", lambda t, r, i: ops.roi_align(t, r, i, (2, 3), 0.5, 2),
             [X, ROIS, IMAGES], _roi_align((2, 3), 0.5, 2)),
    OpRecord("roi_align_one", lambda t, r, i: ops.roi_align(t, r, i, (1, 1), 1.0, 1),
             [X, ROIS, IMAGES], _roi_align((1, 1), 1.0, 1)),
]  # fmt: skip
