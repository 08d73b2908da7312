"""Rules for the whole tree that no other tool checks: sizes, import directions, no hidden code."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
APPLICATION_FOLDERS = (
    "checkpoints",
    "config",
    "data",
    "files",
    "huggingface",
    "modelling",
    "planning",
    "run",
    "sessions",
    "terminal",
)
RUNTIME = ROOT / "runtime" / "src"
LONGEST_FUNCTION = 80
# Modules that run code found in data when they read it.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def files_under(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


SCRIPTS = sorted(ROOT.glob("*.py"))
APPLICATION = SCRIPTS + files_under(*(ROOT / name for name in APPLICATION_FOLDERS))
# Torch is a reference for tests and benchmarks, what runs the model that one script shows, and what
# reads the files that it alone can read.
OF_TORCH = ("torch_model.py", "pytorch_bin_files.py")
WITHOUT_TORCH = [path for path in APPLICATION if path.name not in OF_TORCH]
PRODUCT = APPLICATION + files_under(RUNTIME)
EVERYTHING = PRODUCT + files_under(
    *(ROOT / name for name in ("tests", "examples", "benchmarks", "docs"))
)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, with their lines; `from a import b` gives `a.b`."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def imports_of(paths: list[Path], packages: set[str]) -> list[str]:
    return [
        f"{place(path, line)} imports {name}"
        for path in paths
        for name, line in imports(path)
        if name.split(".")[0] in packages
    ]


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def test_functions_fit_a_screen():
    long = [
        f"{place(path, node.lineno)} {node.name}: {length} lines"
        for path in PRODUCT
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    assert not long


@pytest.mark.parametrize(
    ("importer", "forbidden"),
    [
        (APPLICATION, {"jax", "jaxlib"}),
        (WITHOUT_TORCH, {"torch"}),
        (files_under(RUNTIME / "popxl_addons"), {"jax", "jaxlib"}),
        (files_under(RUNTIME / "popxl"), {"popxl_addons"}),
        (files_under(RUNTIME), {*APPLICATION_FOLDERS, "benchmarks"}),
    ],
    ids=[
        "application-jax",
        "application-torch",
        "popxl_addons-jax",
        "popxl-upwards",
        "runtime-upwards",
    ],
)
def test_imports_go_one_way(importer, forbidden):
    assert not imports_of(importer, forbidden)


def test_folders_of_the_application_import_downwards_only():
    """No arrow back, and so no circle, between them."""
    order = (
        *("files", "config", "terminal", "checkpoints", "huggingface", "data"),
        *("modelling", "planning", "sessions", "run"),
    )
    assert set(order) == set(APPLICATION_FOLDERS)
    for i, folder in enumerate(order):
        assert not imports_of(files_under(ROOT / folder), {*order[i + 1 :], "benchmarks"})


def type_checking_nodes(path: Path) -> set[ast.AST]:
    """Nodes below `if TYPE_CHECKING:`, which a run never reaches."""
    blocks = [
        node
        for node in nodes_of(path)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {inner for block in blocks for inner in ast.walk(block)}


@pytest.mark.parametrize("folder", APPLICATION_FOLDERS)
def test_files_and_sub_folders_of_a_folder_import_in_no_circle(folder):
    """Imports for type checkers alone are left out."""
    graph: dict[str, set[str]] = {}
    for path in files_under(ROOT / folder):
        importer = path.relative_to(ROOT / folder).with_suffix("").parts[0]
        checked_only = type_checking_nodes(path)
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node not in checked_only:
                names = [f"{node.module}.{alias.name}".split(".") for alias in node.names]
                imported = {name[1] for name in names if name[0] == folder}
                graph.setdefault(importer, set()).update(imported - {importer})
    assert list(TopologicalSorter(graph).static_order())


def test_imports_of_the_application_find_their_modules():
    """A module that was moved is missed here, and not by who first runs what imports it."""
    missing = []
    for path in [*EVERYTHING, *files_under(ROOT / "imgs")]:
        if "toy_family" in path.parts:  # which a test copies into the tree
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if found := re.match(r"\s*from ([\w.]+) import ", line):
                place_of = ROOT.joinpath(*found[1].split("."))
                if place_of.relative_to(ROOT).parts[0] in APPLICATION_FOLDERS and not (
                    place_of.is_dir() or place_of.with_suffix(".py").is_file()
                ):
                    missing.append(f"{place(path, number)} imports {found[1]}")
    assert not missing


def test_one_file_knows_the_layout_of_a_run():
    """What is in a run's folder is asked of `files.run_folder`; texts for people may name it."""
    names = {
        value.value
        for value in nodes_of(ROOT / "files" / "run_folder.py")
        if isinstance(value, ast.Constant) and re.fullmatch(r"\w+\.\w+", str(value.value))
    }
    assert {"config.yml", "metrics.jsonl", "eval.json"} <= names
    found = [
        place(path, node.lineno)
        for path in APPLICATION
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    # A model folder of Hugging Face has a picture of the same name.
    others = [one for one in found if not one.startswith("huggingface/model_card_text.py")]
    assert all(one.startswith("files/run_folder.py") for one in others), others


def test_nobody_imports_the_scripts():
    """A test may: it calls a script's main."""
    found = [
        f"{place(path, line)} imports {name}"
        for path in PRODUCT
        for name, line in imports(path)
        if name.startswith("run_")
    ]
    assert not found


def test_the_application_uses_public_names_of_the_runtime():
    found = [
        f"{place(path, line)} imports {name}"
        for path in APPLICATION
        for name, line in imports(path)
        if name.split(".")[0] in ("popxl", "popxl_addons", "popart", "popdist")
        and any(map(is_private, name.split(".")))
    ]
    assert not found


def test_the_application_leaves_private_attributes_alone():
    """`x._y` belongs to the class that defines `_y`, which calls it `self`, `cls` or `super()`."""
    found = []
    for path in APPLICATION:
        own = {name for node in nodes_of(path) for name in _defined_names(node) if is_private(name)}
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
                base = node.value
                if not (isinstance(base, ast.Name) and base.id in ("self", "cls")):
                    found.append(f"{place(path, node.lineno)} uses .{node.attr}")
    # argparse gives its groups a type, which stands in an annotation, but no public name for it;
    # os._exit is public in spite of its name, and ir._pb_ir is how PopXL programs reach options.
    public = ("._ArgumentGroup", "._exit", "._pb_ir")
    assert [use for use in found if not use.endswith(public)] == []


def _defined_names(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
            return [name]
    return []


def test_no_code_from_data():
    found = imports_of(PRODUCT, UNPICKLERS)
    for path in PRODUCT:
        for node in nodes_of(path):
            match node:
                case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                    found.append(f"{place(path, node.lineno)} calls {name}")
                case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                    found.append(f"{place(path, node.lineno)} allows pickle")
                case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                    found.append(f"{place(path, node.lineno)} runs downloaded code")
    assert not found


def test_a_todo_has_a_name_or_an_issue():
    todos = [
        place(path, token.start[0])
        for path in EVERYTHING
        if re.search(r"TODO|FIXME", text := path.read_text("utf-8"))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
        and re.search(r"TODO|FIXME", token.string)
        and not re.search(r"TODO\((#\d+|\w+)\)", token.string)
    ]
    assert not todos


def test_the_checks_see_the_tree():
    """The rules above would pass on nothing."""
    names = {path.relative_to(ROOT).as_posix() for path in PRODUCT}
    assert {"config/base.py", "run/records/metrics_logger.py"} <= names
    assert any(name.startswith("runtime/src/popxl/") for name in names)


# ---- circles of imports in popxl ----------------------------------------------------------------
IR_KNOT = {
    *("popxl._ir.op", "popxl._ir.op_registry", "popxl._ir.regions", "popxl.context"),
    *("popxl.graph", "popxl.ir", "popxl.remote_buffer", "popxl.streams", "popxl.tensor"),
}


def modules_of_popxl() -> dict[str, set[str]]:
    """What each module of popxl imports, also for type checkers and in functions. A package stands
    for the names that it gathers: it is no module here."""
    paths = {
        ".".join(path.relative_to(RUNTIME).with_suffix("").parts): path
        for path in files_under(RUNTIME / "popxl")
        if path.name != "__init__.py"
    }
    found = {}
    for module, path in paths.items():
        names = {name for name, _ in imports(path)}
        names |= {name.rpartition(".")[0] for name in names}
        found[module] = names & set(paths) - {module}
    return found


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """What `start` imports, directly or not."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        waiting += (new := graph[waiting.pop()] - found)
        found |= new
    return found


def test_only_the_ir_imports_itself_in_a_circle():
    """Its classes name each other. What lies above the IR does not need to."""
    graph = modules_of_popxl()
    assert {module for module in graph if module in reached(graph, module)} == IR_KNOT


def test_ops_do_not_import_their_package():
    """`popxl.ops` gathers them: an op that imports it imports all others, in a circle."""
    found = [
        f"{place(path, line)} imports {name}"
        for path in files_under(RUNTIME / "popxl")
        for name, line in imports(path)
        if name == "popxl.ops" and path.name != "__init__.py"
    ]
    assert not found


# ---- layers of popxl ----------------------------------------------------------------------------
LAYERS = (
    *("_ir", "_analysis", "ops", "transforms", "_schedule", "_devices", "_storage", "_compile"),
    *("_run", "plan", "session"),
)
# Modules outside the folders are the IR, as programs import it, but for these.
ABOVE_THE_IR = {"custom": "ops", "hardware": "session", "timing": "_run"}
LAYER_OF = {name: name for name in LAYERS} | ABOVE_THE_IR


def layer_of(module: str) -> int:
    return LAYERS.index(LAYER_OF.get(module.split(".")[1], "_ir"))


def test_layers_of_popxl_import_downwards_only():
    """No arrow back, and so no circle, between them, also for type checkers and in functions."""
    graph = modules_of_popxl()
    wrong = [
        f"{module} imports {name}"
        for module, found in graph.items()
        for name in found
        if layer_of(name) > layer_of(module)
    ]
    assert wrong == []
    assert {LAYERS[layer_of(module)] for module in graph} == set(LAYERS)


def test_a_schedule_is_data():
    """What the host does is decided without arrays: nothing of it asks JAX."""
    assert not imports_of(files_under(RUNTIME / "popxl" / "_schedule"), {"jax", "jaxlib"})
