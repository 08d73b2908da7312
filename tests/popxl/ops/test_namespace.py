"""Names that programs import."""

from __future__ import annotations

import importlib

import pytest

import popxl
from popxl import ops


def test_all_lists_what_is_there() -> None:
    for name in ops.__all__:
        assert hasattr(ops, name)
    for name in ops.var_updates.__all__:
        assert name in dir(ops.var_updates)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("popxl.ops.call", "CallSiteInfo"),
        ("popxl.ops.utils", "check_in_graph"),
        ("popxl.ops.utils", "check_tensor_ipu_and_tile_set"),
        ("popxl.ops.utils", "cast_if_needed"),
        ("popxl.ops.collectives.collectives", "CollectiveOps"),
        ("popxl.ops.var_updates.accumulate", "accumulate_"),
    ],
)
def test_paths_that_programs_import(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_helpers_for_custom_ops() -> None:
    from popxl.ops import utils

    ir = popxl.Ir()
    other = ir.create_empty_graph()
    with ir.main_graph:
        t = popxl.variable([[1.0, 2.0]])
        utils.check_in_graph(ir.main_graph, t=t)
        with pytest.raises(ValueError, match="belongs to graph"):
            utils.check_in_graph(other, t=t)
        utils.check_tensor_ipu_and_tile_set(t=t)
        with pytest.raises(ValueError, match="is on IPU 0, but .* is on IPU 1"):
            utils.check_tensor_ipu_and_tile_set(a=t.copy_to_ipu(0, 0), b=t.copy_to_ipu(1, 0))
        assert utils.cast_if_needed(t, popxl.float32) is t
        assert utils.cast_if_needed(t, popxl.float16).dtype == popxl.float16
        assert utils.handle_negative_axis(t, -1) == 1
    assert utils.convert_optional_float(None) is None
    assert utils.convert_optional_int(3.0) == 3  # type: ignore[arg-type]
    assert utils.convert_optional_int64_list([1]) == [1]
    assert utils.convert_optional_dtype(popxl.float16) is popxl.float16
