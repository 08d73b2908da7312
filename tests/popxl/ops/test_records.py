"""Every op against its record: values, gradients, dtypes, the verifier, the text form."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from popxl import ops
from popxl._ir.op_registry import registry
from popxl.lazy_exports import load_all
from tests.popxl.ops.harness import (
    Case,
    OpRecord,
    cases_of,
    check,
    compile_quickly,
    run_cases,
    write_cases,
)

load_all("popxl")
load_all("popxl_addons")

FAMILIES = sorted(p.stem for p in (Path(__file__).parent / "records").glob("*.py"))

# Ops that act on the program's state or on graphs, which tests of their own cover.
STRUCTURAL = {
    "call", "code_copy", "conditional", "conditional_grad", "hold", "host_load",
    "host_store", "init", "io_tile_copy", "ipu_copy", "part", "pick", "print_tensor",
    "remote_load", "remote_store", "repeat", "repeat_grad",
}  # fmt: skip
# Ops that autodiff makes.
OF_GRADIENTS = {"fp8_linear_grads", "grad_maximum", "grad_sum", "vjp"}
# Ops whose references no record can hold: test_fp8.py.
OF_FP8 = {"fp8_cast", "fp8_delayed_scales"}
# Ops that change no value: test_gpu_kernels.py.
WITHOUT_EFFECT = {"shift_by_zero"}
# Ops whose results have properties but no reference: test_random.py.
RANDOM = {
    "create_random_seed", "dropout", "random_normal", "random_uniform", "split_random_seed",
}  # fmt: skip
# Ops of popxl_addons, defined if anything has imported them: tests/popxl_addons.
OF_ADDONS = {
    *("cross_entropy_label", "fp8_amax_scale", "fp8_mse_scale"),
    *("group_quantize_decompress", "saturate", "round_by_hash"),
    *("count_expert_usage", "sort_by_expert", "sort_local_experts", "repeat_by_group"),
    *("scatter_router_weights", "scale_rows"),
    *(
        "quantize_first_moment",
        "dequantize_first_moment",
        "quantize_second_moment",
        "dequantize_second_moment",
    ),
    *("residual_of_weight", "split_weight"),
}
COLLECTIVE_FAMILY = ("replica", "all_reduce")
# Not those of the application and of tests, which are there if anything has imported them.
DEFINED = {
    name for name, defn in registry().items()
    if defn.home.split(".")[0] in ("popxl", "popxl_addons")
    and "collective" not in defn.tags and not name.startswith(COLLECTIVE_FAMILY)
}  # fmt: skip


def _records(family: str) -> list[OpRecord]:
    """In float16 each op runs once; its further uses run there in slow tests."""
    records = importlib.import_module(f"tests.popxl.ops.records.{family}").RECORDS
    in_float16 = [record.name for record in records if "float16" in record.dtypes]
    return [
        replace(record, dtypes=("float32",), more=("float16", *record.more))
        if record.dtypes == ("float32", "float16") and _is_further_use(record.name, in_float16)
        else record
        for record in records
    ]


def _is_further_use(name: str, others: Sequence[str]) -> bool:
    """True if a record's name is no op's but continues that of another record."""
    if hasattr(ops, name) or hasattr(ops.var_updates, name):
        return False
    return any(name.startswith(f"{other.rstrip('_')}_") for other in others if other != name)


CASES = {family: {case.id: case for case in cases_of(_records(family))} for family in FAMILIES}


@cache
def _run(family: str) -> None:
    compile_quickly()
    run_cases(list(CASES[family].values()))


@pytest.mark.parametrize(
    ("family", "case_id"),
    [
        pytest.param(family, case_id, id=f"{family}-{case_id}")
        for family, cases in CASES.items()
        for case_id in cases
    ],
)
def test_op(family: str, case_id: str) -> None:
    """Values, dtypes and gradients are those of the reference, and the text form names the ops."""
    _run(family)
    case = CASES[family][case_id]
    check(case)
    assert case.graph is not None
    text = str(case.graph)
    for op in case.graph.ops:
        assert f"{op.name}(" in text


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ops_in_all_dtypes_optimised_as_for_users(family: str) -> None:
    cases = cases_of(_records(family), more=True)
    run_cases(cases)
    for case in cases:
        check(case)


def test_each_op_has_a_record() -> None:
    used: set[str] = set()
    for family, run in CASES.items():
        cases = list(run.values())
        if not all(case.used for case in cases):
            # Of their own: a case that is to run is written once.
            cases = [Case(r, (r.dtypes or r.more)[0]) for r in _records(family)]
            write_cases(cases)  # running them as well would take minutes
        for case in cases:
            used |= case.used
    missing = (
        DEFINED - used - STRUCTURAL - OF_GRADIENTS - OF_FP8 - WITHOUT_EFFECT - RANDOM - OF_ADDONS
    )
    assert not missing, f"ops without a record: {sorted(missing)}"
