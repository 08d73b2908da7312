"""Low-rank adapters of experts' maps, as PEFT's for parameters that stack them."""

from __future__ import annotations

from typing import Any

from modelling.layers.module import Module, cast
from modelling.weights import WeightRow
from popxl import Tensor, float32, ops


class ExpertAdapter(Module):
    """scale * B_e A_e x for each row of x, of its expert e.

    Variables, float32: `A` and `B`, of each expert one after the other. What experts' maps have on
    the side that tensor parallelism cuts is cut like them, the other matrix is the same on all
    replicas; of whole experts that are shared out, both are.

    Args:
        row: of the experts' matrices, whose input features are cut if it is transposed.
    """

    def __init__(self, row: WeightRow) -> None:
        super().__init__()
        adapter = row.adapters[0]  # those of all experts are alike
        self._rank, self._scale = adapter.rank, adapter.scale
        self._cut_in, self._shared_out = row.transpose, row.shared_out

    def build(self, x: Tensor, y: Tensor, sizes: Tensor, usual: int | None, rows: Tensor) -> Tensor:
        """y with the adapters, of the same type: the products of rows of x with experts' maps.

        Args:
            x: (tokens, in features), of which `rows` says each one's; or one for each of `rows`,
                where these say to which row of y each product is added.
            sizes, usual, rows: see `ops.grouped_matmul`.
        """
        rank, out, experts = self._rank, y.shape[-1], sizes.shape[0]
        wide: dict[str, Any] = {"sizes": sizes, "usual": usual}
        x = cast(x, float32) * self._scale
        if self._cut_in:
            a = self._cut("A", (experts * x.shape[-1], rank))
            b = self._open(self._whole("B", (experts * rank, out)))
            inner = ops.grouped_matmul(x, a, **wide)
            more = ops.grouped_matmul(inner, b, **wide, rows=rows, into=y.shape[0])
        else:
            a = self._open(self._whole("A", (experts * rank, x.shape[-1])))
            b = self._cut("B", (experts * out, rank))
            inner = ops.grouped_matmul(x, a, **wide, transpose=True, rows=rows)
            more = ops.grouped_matmul(inner, b, **wide, transpose=True)
        return cast(cast(y, float32) + more, y.dtype)

    def _cut(self, name: str, shape: tuple[int, int]) -> Tensor:
        return self.variable(name, shape, float32, self.groups.sharded)

    def _whole(self, name: str, shape: tuple[int, int]) -> Tensor:
        return self.variable(
            name, shape, float32, self.groups.sharded if self._shared_out else None
        )

    def _open(self, t: Tensor) -> Tensor:
        return t if self._shared_out else self.groups.copy_to_tp(t)
