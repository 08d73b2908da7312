"""Our packages have PopXL's public names and parameters, or say why not."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest

from popxl import ops
from runtime.tools import compare_api


def test_names_and_parameters_are_popxls_or_listed_with_a_reason():
    assert compare_api.unexplained_differences() == []


def test_the_lists_are_whole():
    """A list that was cut would make the test above pass."""
    lists = compare_api.signature_lists()
    assert len(lists) >= 196
    assert sum(len(names.get("functions", ())) for names in lists.values()) >= 327
    assert sum(len(names.get("classes", ())) for names in lists.values()) >= 60


def _module(**names):
    module = types.ModuleType("made_up")
    vars(module).update(names)
    return module


class _Thing:
    def __init__(self, size):
        self.size = size

    @property
    def name(self):
        return ""


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ({"functions": {"f": ["x", "n=1"]}}, []),
        ({"functions": {"f": ["x"]}}, ["made_up.f"]),
        ({"functions": {"f": ["x", "n=2"]}}, ["made_up.f"]),
        ({"functions": {"f": ["x", "*", "n=1"]}}, ["made_up.f"]),
        ({"constants": ["g"]}, ["made_up.g"]),
        ({"classes": {"Thing": {"attributes": ["size"], "properties": {"name": "read"}}}}, []),
        ({"classes": {"Thing": {"attributes": ["colour"]}}}, ["made_up.Thing.colour"]),
        ({"classes": {"Thing": {"properties": {"name": "settable"}}}}, ["made_up.Thing.name"]),
        ({"classes": {"Thing": {"methods": {"__init__": ["self", "size"]}}}}, []),
        ({"classes": {"Thing": {"methods": {"__init__": ["self"]}}}}, ["made_up.Thing.__init__"]),
    ],
    ids=str,
)
def test_a_difference_is_found(monkeypatch, expected, found):
    module = _module(f=lambda x, n=1: x, Thing=_Thing)
    monkeypatch.setattr(compare_api.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(compare_api, "signature_lists", lambda: {"made_up": expected})
    assert list(compare_api.signature_differences()) == found


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("popxl.ops.add", ["add", "add_"]),
        ("popxl.ops.cast", ["cast", "pow2scale_cast_to_fp8"]),
        ("popxl.ops.sum", ["sum"]),
        ("popxl.ops.collectives.replicated_all_gather", ["replicated_all_gather"]),
    ],
)
def test_paths_of_popxl_lead_to_the_ops_and_leave_the_functions_alone(path, names):
    module = importlib.import_module(path)
    assert set(names) <= set(dir(module))
    home = ops.collectives if "collectives" in path else ops
    for name in names:
        assert getattr(module, name) is getattr(home, name)
    assert callable(getattr(home, path.rpartition(".")[2]))
    with pytest.raises(AttributeError, match=f"{path}.* has no attribute 'nothing'"):
        _ = module.nothing
    assert not hasattr(module, "__file__")


def test_a_path_can_be_the_first_import_of_a_program():
    code = "from popxl.ops.add import add, add_; from popxl import ops; assert add is ops.add"
    subprocess.run([sys.executable, "-c", code], check=True)
