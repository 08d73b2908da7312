"""Random attention against torch: every combination of what hides keys, rows without keys included.

A query that sees no key gives 0 and gradients of 0, as torch's own attention does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from popxl import ops
from popxl.ops import fused_attention
from popxl.ops._attention_math import AttentionAttrs
from tests.popxl.ops.cudnn_stand_in import use_stand_in
from tests.popxl.ops.harness import OpRecord, cases_of, compile_quickly, reference, run_cases
from tests.properties.settings import FAST, SLOW

LOW = {
    "scores": 0.0, "-inf": -np.inf, "lowest": np.finfo(np.float32).min, "-1e9": -1e9,
}  # fmt: skip
"""What is added to some elements of a bias."""


@dataclass(frozen=True)
class Attention:
    """One use of `ops.attention`.

    Attributes:
        leading: axes before the heads.
        heads: of q, and how many share one of k; None: there is no axis of heads.
        values: features of v; 4: as many as k has, as cuDNN's kernel wants.
        biases: of each, which axes of the scores it has, and what is added to half of it.
        inputs: which of positions, segments, lengths and sinks are given.
    """

    leading: tuple[int, ...]
    heads: tuple[int, int] | None
    queries: int
    keys: int
    values: int
    causal: bool
    window: int | tuple[int, int] | None
    cap: float | None
    biases: tuple[tuple[tuple[bool, ...], str], ...]
    inputs: frozenset[str]
    fused: bool
    dtype: str
    seed: int

    def record(self) -> OpRecord:
        """The use, and what torch computes for it."""
        named = self._named()
        names = list(named)[3:]

        def ours(q: Any, k: Any, v: Any, *rest: Any) -> Any:
            given = dict(zip(names, rest, strict=True))
            pairs = {n: (given[n], given[f"{n}_of_keys"])
                     for n in ("positions", "segments") if n in given}  # fmt: skip
            single = {n: given[n] for n in ("lengths", "sinks") if n in given}
            return ops.attention(
                q, k, v, [given[n] for n in names if n.startswith("bias")], 0.5,
                causal=self.causal, window=self.window, cap=self.cap, fused=self.fused,
                **pairs, **single,
            )  # fmt: skip

        def theirs(q: Any, k: Any, v: Any, *rest: Any) -> Any:
            return self.by_the_definition(q, k, v, dict(zip(names, rest, strict=True)))

        return OpRecord("attention", ours, list(named.values()), theirs, (self.dtype,))

    def by_the_definition(self, q: Any, k: Any, v: Any, given: dict[str, Any]) -> Any:
        if self.heads is not None:
            k, v = (t.repeat_interleave(self.heads[1], -3) for t in (k, v))
        scores = q @ k.mT * 0.5
        scores = scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)
        scores = sum((given[n] for n in given if n.startswith("bias")), scores)
        scores = scores.float().double()  # float32 is part of the definition of a low bias
        seen = self._seen(given) & (scores > -torch.inf)
        if "sinks" in given:
            column = given["sinks"][:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores.masked_fill(~seen, -torch.inf), column], -1)
            return torch.softmax(scores, -1)[..., :-1] @ v
        scores = scores.masked_fill(~seen & seen.any(-1, keepdim=True), -torch.inf)
        scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0)
        return torch.softmax(scores, -1).masked_fill(~seen, 0) @ v

    def _seen(self, given: dict[str, Any]) -> Any:
        def facing(name: str) -> Any:
            return given[name][:, None, :, None], given[f"{name}_of_keys"][:, None, None, :]

        seen = torch.ones(self.queries, self.keys, dtype=torch.bool)
        if self.causal or self.window:
            at, of = torch.arange(self.queries)[:, None], torch.arange(self.keys)
            if "positions" in given:
                at, of = facing("positions")
            window = self.window or 99
            before, after = window if isinstance(window, tuple) else (window - 1, 0)
            seen = seen & (at - of <= before) & (of - at <= (0 if self.causal else after))
        if "segments" in given:
            at, of = facing("segments")
            seen = seen & (at == of)
        if "lengths" in given:
            seen = seen & (torch.arange(self.keys) < given["lengths"][:, None, None, None])
        return seen

    def _named(self) -> dict[str, np.ndarray]:
        rng, heads = np.random.default_rng(self.seed), self.heads
        of_q = self.leading if heads is None else (*self.leading, heads[0] * heads[1])
        of_k = self.leading if heads is None else (*self.leading, heads[0])
        named = {
            "q": rng.normal(size=(*of_q, self.queries, 4)),
            "k": rng.normal(size=(*of_k, self.keys, 4)),
            "v": rng.normal(size=(*of_k, self.keys, self.values)),
        }
        for number, (axes, low) in enumerate(self.biases):
            scores = (*of_q, self.queries, self.keys)[-len(axes) :]
            shape = [n if there else 1 for n, there in zip(scores, axes, strict=True)]
            bias = rng.normal(size=shape).astype(np.float32)
            bias[rng.integers(2, size=shape) == 1] += np.float32(LOW[low])
            named[f"bias{number}"] = bias
        if "sinks" in self.inputs:
            named["sinks"] = rng.normal(size=of_q[-1])
        for name, most in (("positions", 7), ("segments", 3)):
            if name in self.inputs:
                rows = int(rng.choice([1, self.leading[0]]))
                pair = [rng.integers(most, size=(rows, n)) for n in (self.queries, self.keys)]
                named[name], named[f"{name}_of_keys"] = (n.astype(np.int32) for n in pair)
        if "lengths" in self.inputs:
            lengths = rng.integers(self.keys + 1, size=self.leading)
            named["lengths"] = lengths.astype(np.int32)
        return named


@st.composite
def attentions(draw: Any) -> Attention:
    rank = draw(st.sampled_from([2, 3, 4, 4, 4, 4, 5]))
    sizes = st.integers(1, 2)
    heads = None if rank == 2 else (draw(sizes), draw(sizes))
    leading = tuple(draw(sizes) for _ in range(max(rank - 3, 0)))
    causal = draw(st.booleans())
    bias = st.tuples(
        st.lists(st.booleans(), min_size=2, max_size=rank).map(tuple), st.sampled_from(list(LOW))
    )
    pair = st.tuples(st.integers(0, 5), st.integers(0, 5))
    window = draw(st.none() | pair | (st.integers(1, 5) if causal else pair))
    inputs = {"sinks": rank > 2, "positions": rank == 4 and (causal or window is not None),
              "segments": rank == 4, "lengths": rank == 4}  # fmt: skip
    return Attention(
        leading,
        heads,
        queries=draw(st.integers(1, 9)),
        keys=draw(st.integers(1, 9)),
        values=draw(st.sampled_from([3, 4, 4])),
        causal=causal,
        window=window,
        cap=draw(st.sampled_from([None, None, 0.7])),
        biases=tuple(draw(st.lists(bias, max_size=2))),
        inputs=frozenset(n for n, can in inputs.items() if can and draw(st.booleans())),
        fused=draw(st.sampled_from([False, True, True])),
        dtype=draw(st.sampled_from(["float32", "float32", "bfloat16"])),
        seed=draw(st.integers(0, 2**16)),
    )


PROGRAMS = st.lists(attentions(), min_size=8, max_size=8)


def check(uses: list[Attention]) -> None:
    compile_quickly()
    cases = [cases_of([use.record()])[0] for use in uses]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_attention, "TILE", 4)
        patch.setattr(fused_attention, "is_supported", is_kernel)
        patch.setattr(fused_attention, "is_installed", lambda: True)
        use_stand_in(patch)
        run_cases(cases)
    for use, case in zip(uses, cases, strict=True):
        if case.error is not None:
            raise case.error
        outs, grads = reference(case)
        found = [*case.outputs, *(case.grads[i] for i in sorted(grads))]
        wanted = [*outs, *(grads[i] for i in sorted(grads))]
        for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            # Where a query sees one key, gradients are 0: sums of numbers of about 1 are left.
            near = 3 * case.tolerance * max(1.0, float(np.abs(theirs).max(initial=0)))
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(
                ours.astype(np.float64), theirs, rtol=0, atol=near,
                err_msg=f"{use}, {number}",
            )  # fmt: skip
        hidden = np.abs(outs[0]).max(-1, initial=0) == 0
        assert (case.outputs[0][hidden] == 0).all(), f"{use}: a row without keys"


def is_kernel(q: Any, k: Any, v: Any, rest: Any, settings: AttentionAttrs) -> bool:
    return q.ndim == 4 and v.shape == k.shape and settings.cap is None and not settings.sinks


@FAST
@given(PROGRAMS)
def test_random_attention(uses: list[Attention]) -> None:
    check(uses)


def test_biases_have_gradients_where_all_that_a_query_sees_is_biased_down() -> None:
    lowest, scores = ((True, False, True), "lowest"), ((False, False, True), "scores")
    inputs = frozenset({"positions", "segments"})
    shape: Any = ((2,), (1, 1), 4, 3, 4)
    check([Attention(*shape, False, (5, 1), None, (lowest, scores), inputs, True, "float32", 3870)])


@pytest.mark.slow
@SLOW
@given(PROGRAMS)
def test_much_random_attention(uses: list[Attention]) -> None:
    check(uses)
