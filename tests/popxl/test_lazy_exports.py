"""Packages import the modules of their names when these are used, and not before."""

from __future__ import annotations

import importlib
import json
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

import finetuning
import inference
import popxl
import sessions.generation
import sessions.training
from popxl.lazy_exports import exported_names, load_all

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime/src")]),
}
PACKAGES = [
    *("popxl", "popxl.ops", "popxl.ops.collectives", "popxl.ops.var_updates", "popxl.plan"),
    *("popxl.transforms", "popxl_addons", "popxl_addons.layers", "popxl_addons.ops"),
    *("popxl_addons.optimizers", "popxl_addons.transforms", "checkpoints"),
    *("modelling.generation", "modelling.layers", "modelling.objectives", "modelling.phases"),
    "modelling.weights",
]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_listed_name_is_there(package):
    module = importlib.import_module(package)
    load_all(package)
    assert exported_names(package)
    assert set(exported_names(package)) <= set(dir(module))
    star: dict[str, object] = {}
    exec(f"from {package} import *", star)
    for name in exported_names(package):
        assert star[name] is getattr(module, name)


def run(code: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_package_alone_imports_no_other_module():
    found = run(
        "import sys, json, popxl; print(json.dumps([n for n in sys.modules if 'pop' in n]))"
    )
    assert sorted(found) == ["popxl", "popxl.lazy_exports"]


def test_an_op_is_imported_when_it_is_used():
    found = run(
        "import sys, json, popxl\nfrom popxl import ops\n"
        "before = 'popxl.ops.convolution' in sys.modules\n"
        "ops.conv\nprint(json.dumps([before, 'popxl.ops.convolution' in sys.modules]))"
    )
    assert found == [False, True]


def test_a_submodule_of_the_same_name_does_not_hide_a_function():
    found = run(
        "import json\nfrom popxl.ops.call import CallSiteInfo\n"
        "from popxl.plan.timeline import Timeline\n"
        "import popxl\nprint(json.dumps([callable(popxl.ops.call), callable(popxl.plan.timeline)]))"
    )
    assert found == [True, True]


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'popxl' has no attribute 'nothing'"):
        _ = popxl.nothing
    with pytest.raises(ImportError, match="nothing"):
        exec("from popxl.ops import nothing")
    assert not hasattr(popxl, "__wrapped__")


def test_an_op_of_a_user_takes_no_name_of_an_op_that_is_not_imported_yet():
    found = run(
        "import json, popxl\nfrom popxl.custom import jax_op\n"
        "def f(x): return x\n"
        "jax_op(f, name='conv')\n"
        "from popxl._ir.op_registry import registry\n"
        "popxl.ops.conv\n"
        "print(json.dumps([n for n in registry() if n.startswith('conv')]))"
    )
    assert {"conv", "conv_2"} <= set(found)


def test_operators_of_tensors_are_ops_whatever_was_imported():
    found = run(
        "import json\nfrom popxl.ir import Ir\nfrom popxl.tensor import variable\n"
        "ir = Ir()\n"
        "with ir.main_graph:\n    x = variable([1.0, 2.0])\n    y = (x + x)[:1]\n"
        "print(json.dumps([list(y.shape), 'add' in str(ir)]))"
    )
    assert found == [[1], True]


def test_root_scripts_export_their_sessions():
    assert finetuning.TrainingSession is sessions.training.TrainingSession
    assert inference.GenerationSession is sessions.generation.GenerationSession


def test_a_package_without_source_says_what_it_needs(tmp_path):
    folder = tmp_path / "compiled_alone"
    folder.mkdir()
    source = folder / "__init__.py"
    source.write_text("from popxl.lazy_exports import lazy_exports\nlazy_exports(__name__)\n")
    py_compile.compile(str(source), str(folder / "__init__.pyc"))
    source.unlink()
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(ImportError, match="compiled_alone reads .* install it with its .py"):
            importlib.import_module("compiled_alone")
    finally:
        sys.path.remove(str(tmp_path))


def test_a_root_script_runs_as_a_module():
    command = [sys.executable, "-m", "finetuning", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
