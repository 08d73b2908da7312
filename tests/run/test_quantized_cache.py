"""The cache of weights in few bits: by what they were made of, and whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from checkpoints.safetensors_files import sha256_of_array, sha256_of_bytes
from config.model import QuantConfig
from modelling.quantization import QUANT_FIELDS, quantize_weight, quantized_shapes
from popxl_addons import NamedTensors
from run import quantized_cache
from run.quantized_cache import QuantizedCache
from tests.full_disk import full_disk

WEIGHTS = {name: np.arange(n, n + 6, dtype=np.float32) for n, name in enumerate("abc")}


class Making:
    """Makes two arrays of tensors, and counts how often."""

    count = 0

    def __call__(self, tensors: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        self.count += 1
        joined = np.stack([tensors["a"], tensors["b"]])
        return [joined.astype(np.uint16).T, joined[:, :1].astype(np.float16)]


@pytest.fixture
def making() -> Making:
    return Making()


@pytest.fixture
def made(tmp_path: Path, making: Making) -> Callable[..., Sequence[np.ndarray]]:
    def of(
        weights: Mapping[str, np.ndarray] = WEIGHTS,
        known: Mapping[str, str] | None = None,
        form: str = "4",
    ) -> Sequence[np.ndarray]:
        return QuantizedCache(weights, known or {}, tmp_path / "packed").get_quantized(
            "ab", form, making
        )

    return of


def check(found: Sequence[np.ndarray]) -> None:
    for one, other in zip(found, Making()(WEIGHTS), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_they_are_made_once(made, making) -> None:
    for _ in range(3):
        check(made())
    assert making.count == 1


def test_what_is_known_is_not_read(made, making) -> None:
    check(made())
    known = {name: sha256_of_array(WEIGHTS[name]) for name in "ab"}
    check(made(dict.fromkeys(WEIGHTS), known))
    assert making.count == 1


def test_those_of_another_base_or_form_are_others(made, making) -> None:
    check(made())
    changed = WEIGHTS | {"b": WEIGHTS["b"] + 1}
    assert (made(changed)[0] != Making()(WEIGHTS)[0]).any()
    made(form="8")
    made(WEIGHTS | {"a": WEIGHTS["b"], "b": WEIGHTS["a"]})
    assert making.count == 4
    made(changed | {"c": WEIGHTS["a"]})
    assert making.count == 4


def test_those_of_another_format_are_made_again(made, making, monkeypatch) -> None:
    monkeypatch.setattr(quantized_cache, "_FORMAT", "1")
    check(made())
    monkeypatch.undo()
    check(made())
    assert making.count == 2


def test_the_format_is_that_of_these_bits() -> None:
    """Where a weight is packed otherwise, `_FORMAT` has to change: caches hold the bits."""
    weight = np.float32(1e-4) * (np.arange(64, dtype=np.float32) * 37 % 64 - 30).reshape(16, 4)
    shapes = zip(QUANT_FIELDS, quantized_shapes((16, 4), QuantConfig(4, 8)), strict=True)
    parts = NamedTensors.from_dict({n: np.empty(s) for n, s in shapes})
    bits = b"".join(part.tobytes() for part in quantize_weight(weight, parts))
    assert (quantized_cache._FORMAT, sha256_of_bytes(bits)[:8]) == ("2", "0e6749ee")


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_damaged_ones_are_made_again(damage, made, making, tmp_path, capsys) -> None:
    made()
    (path,) = (tmp_path / "packed").iterdir()
    whole = path.read_bytes()
    flipped = whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:]
    path.write_bytes({"cut": whole[:-40], "changed": flipped, "empty": b""}[damage])
    check(made())
    assert making.count == 2
    assert f"{path} is damaged: it is computed again" in capsys.readouterr().err
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_ends_nothing(made, tmp_path, capsys) -> None:
    (tmp_path / "packed").write_text("a file")
    check(made())
    assert "the next start quantizes again" in capsys.readouterr().err


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path, making, capsys) -> None:
    packed = QuantizedCache(WEIGHTS, {}, tmp_path / "packed")
    with full_disk(100):
        for form in ("4", "8"):
            check(packed.get_quantized("ab", form, making))
    assert capsys.readouterr().err.count("File too large; the next start quantizes again") == 1
    assert not list((tmp_path / "packed").iterdir())
