"""Rounding to float8, on the device and on the host, against the definition of the formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import popxl
from popxl import fp8_utils, ops
from tests.popxl.ops.harness import evaluate

KINDS = {"float8_143": (popxl.float8_143, 4, 3, 8), "float8_152": (popxl.float8_152, 5, 2, 16)}


def values_of(name: str) -> np.ndarray:
    """All 256 values by byte: sign, exponent, mantissa; 0x80 is NaN."""
    _, _, mantissa_bits, bias = KINDS[name]
    byte = np.arange(256)
    sign = np.where(byte >> 7, -1.0, 1.0)
    exponent = (byte & 0x7F) >> mantissa_bits
    fraction = (byte & (2**mantissa_bits - 1)) / 2**mantissa_bits
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    denormal = fraction * 2.0 ** (1 - bias)
    values = sign * np.where(exponent > 0, normal, denormal)
    values[0x80] = np.nan
    return values


def nearest(name: str, x: np.ndarray) -> np.ndarray:
    """Nearest value, of two equally near ones the one with an even byte; NaN beyond the range."""
    finite = np.delete(values_of(name), 0x80)
    order = np.argsort(finite, kind="stable")
    sorted_values, bytes_ = finite[order], np.delete(np.arange(256), 0x80)[order]
    high = np.clip(np.searchsorted(sorted_values, x), 1, 254)
    low = high - 1
    gap_low, gap_high = x - sorted_values[low], sorted_values[high] - x
    pick = np.where(
        gap_low == gap_high,
        np.where(bytes_[low] % 2 == 0, low, high),
        np.where(gap_low < gap_high, low, high),
    )
    out = sorted_values[pick]
    step = sorted_values[-1] - sorted_values[-2]
    return np.where(np.abs(x) >= sorted_values[-1] + step / 2, np.nan, out)


def samples(name: str) -> np.ndarray:
    """Every value, every midpoint, and numbers around them."""
    values = np.sort(np.delete(values_of(name), 0x80))
    middles = (values[1:] + values[:-1]) / 2
    rng = np.random.default_rng(1)
    around = np.concatenate([values, middles]) * (1 + rng.uniform(-1e-2, 1e-2, 509))
    large = np.array([values[-1] * 1.5, -values[-1] * 4])
    return np.concatenate([values, middles, around, large]).astype(np.float32)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scale", [0, 3, -2])
def test_casts_round_to_nearest_even(name: str, scale: int) -> None:
    kind = KINDS[name][0]
    x = samples(name) * np.float32(2.0**-scale)
    want = nearest(name, x.astype(np.float64) * 2.0**scale)

    def build(t, s):
        y = ops.pow2scale_cast_to_fp8(t, s, kind)
        return y, ops.pow2scale_cast_from_fp8(y, ops.negate(s), popxl.float32)

    raw, back = evaluate(build, x, np.array(scale, np.int32))
    assert raw.dtype == kind.as_numpy()
    np.testing.assert_array_equal(values_of(name)[raw.view(np.uint8)], want)
    np.testing.assert_array_equal(back, (want * 2.0**-scale).astype(np.float32))
    host = fp8_utils.host_pow2scale_cast_to_fp8(x, kind, scale)
    np.testing.assert_array_equal(host.view(np.uint8), raw.view(np.uint8))


def test_float8_constants_and_variables_pass_through() -> None:
    data = np.array([0.5, -3.0, 100.0], np.float32)

    def build():
        t = popxl.variable(data, popxl.float8_143, log2_scale=1)
        zero = popxl.constant(-1, popxl.int32)
        return ops.pow2scale_cast_from_fp8(ops.identity(t), zero, popxl.float16)

    # 200 lies between 192 and 208; the tie goes to 192
    np.testing.assert_array_equal(evaluate(build)[0], [0.5, -3.0, 96.0])


def test_host_overflow_is_nan_or_the_largest() -> None:
    x = np.array([1e6, -1e6, np.inf, 240.0])
    nan = fp8_utils.host_pow2scale_cast_to_fp8(x)
    np.testing.assert_array_equal(nan.view(np.uint8), [0x80, 0x80, 0x80, 0x7F])
    most = fp8_utils.host_pow2scale_cast_to_fp8(x, nan_on_overflow=False)
    back = fp8_utils.host_pow2scale_cast_from_fp8(most, popxl.float16)
    assert back.dtype == np.float16
    np.testing.assert_array_equal(back, [240.0, -240.0, np.nan, 240.0])  # infinity stays none


def _by_the_book(x: np.ndarray, name: str) -> tuple[float, int]:
    """The estimate in float64, as it is described: histogram, windows, weights."""
    low, span, bits = (-10, 18, 3) if name == "float8_143" else (-17, 33, 2)
    mantissa = {"float32": 23, "float16": 10}[x.dtype.name]
    size = np.abs(x[x != 0].astype(np.float64))
    exponents = np.floor(np.log2(size)).astype(int)
    costs = []
    for bias in range(-31, 32):
        cost = 0.0
        for e in range(-126, 127):
            inside = low + bias <= e < low + bias + span
            weight = 2.0 ** (-2 * (mantissa - bits)) if inside else 1.0
            cost += np.count_nonzero(exponents == e) / x.size * 2.0 ** (2 * e) * weight
        costs.append(cost)
    best = [i for i, cost in enumerate(costs) if cost == min(costs)]
    return min(costs), -(best[len(best) // 2] - 31)


@pytest.mark.parametrize("name", ["float8_143", "float8_152"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 3e4])
def test_mse_scale_is_the_estimate_of_a_histogram(name: str, dtype: type, spread: float) -> None:
    x = np.random.default_rng(2).standard_t(3, 500).clip(-2, 2) * spread
    found = fp8_utils.host_fp8_mse_scale(x.astype(dtype), popxl.dtype.from_name(name))
    expected = _by_the_book(x.astype(dtype), name)
    assert found[1] == expected[1]
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert (type(found[0]), type(found[1])) == (float, int)


@pytest.mark.parametrize(
    ("low", "high", "name", "scale"),
    [
        (2.0**-10, 240.0, "float8_143", 0),
        (2.0**-17, 57344.0, "float8_152", 0),
        (16.0, 31.9, "float8_143", -6),
        (0.125, 0.2499, "float8_143", 1),
    ],
)
def test_mse_scales_of_ranges(low: float, high: float, name: str, scale: int) -> None:
    x = np.geomspace(low, high, 200).astype(np.float32)
    assert fp8_utils.host_fp8_mse_scale(x, popxl.dtype.from_name(name))[1] == scale


def test_mse_scale_of_zeros_is_0_and_of_other_types_an_error() -> None:
    assert fp8_utils.host_fp8_mse_scale(np.zeros(3, np.float32)) == (0.0, 0)
    for dtype in (np.float64, np.int32):
        with pytest.raises(RuntimeError, match="float16 and float32"):
            fp8_utils.host_fp8_mse_scale(np.ones(3, dtype))
    with pytest.raises(ValueError, match="no float8 dtype"):
        fp8_utils.host_fp8_mse_scale(np.ones(3, np.float32), popxl.float16)


def test_exponential_ranges() -> None:
    ranges = [
        fp8_utils.find_exponential_range(f)
        for f in (fp8_utils.ieee_fp32_no_denorms, fp8_utils.ieee_fp16_denorms,
                  fp8_utils.float8_152_def, fp8_utils.float8_143_def)
    ]  # fmt: skip
    assert ranges == [(-126, 127), (-24, 15), (-17, 15), (-10, 7)]


def test_host_errors() -> None:
    x = np.ones(2, np.float32)
    with pytest.raises(RuntimeError, match="no float8 dtype"):
        fp8_utils.host_pow2scale_cast_to_fp8(x, popxl.float16)
    with pytest.raises(RuntimeError, match="not int32"):
        fp8_utils.host_pow2scale_cast_to_fp8(np.ones(2, np.int32), popxl.float8_143)
    with pytest.raises(ValueError, match=r"log2_scale must be in \[-32, 32\)"):
        fp8_utils.host_pow2scale_cast_to_fp8(x, log2_scale=32)
    with pytest.raises(RuntimeError, match="must be float8, but is float32"):
        fp8_utils.host_pow2scale_cast_from_fp8(x, popxl.float32)
    kept = fp8_utils.host_pow2scale_cast_to_fp8(x)
    for dtype in (None, popxl.int32, popxl.float8_143, popxl.bfloat16):
        with pytest.raises(RuntimeError, match="becomes float16, float32 or float64"):
            fp8_utils.host_pow2scale_cast_from_fp8(kept, dtype)


def test_host_casts_take_torch_tensors_and_lists() -> None:
    wanted = fp8_utils.host_pow2scale_cast_to_fp8(np.array([0.5, 3.0]), popxl.float8_152, 1)
    for source in (torch.tensor([0.5, 3.0], dtype=torch.float64), [0.5, 3.0]):
        found = fp8_utils.host_pow2scale_cast_to_fp8(source, popxl.float8_152, 1)
        assert found.tolist() == wanted.tolist()
    for dtype in (popxl.float16, popxl.float32, popxl.float64):
        assert fp8_utils.host_pow2scale_cast_from_fp8(wanted, dtype, -1).tolist() == [0.5, 3.0]


def test_the_scale_alone() -> None:
    x = np.array([17.0, 30.0], np.float32)
    assert fp8_utils.host_fp8_mse_scale_pb(x, popxl.float8_143) == -6
    with pytest.raises(RuntimeError, match="for one dtype"):
        fp8_utils.host_fp8_mse_scale_pb(x)
