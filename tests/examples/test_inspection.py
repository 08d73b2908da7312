"""Names, printed tensors and pictures of graphs."""

from __future__ import annotations

import re

import popxl
from examples import inspection


def test_names_say_where_a_tensor_was_made(tmp_path) -> None:
    _, names = inspection.program(tmp_path)
    scopes = [name for name in names if "outer/scaled/" in name]
    assert any(name.endswith("/outer/scaled/factor") for name in scopes)
    assert len(scopes) == 2
    assert all("layer_subgraph(0)/" in name for name in names)


def test_tensors_and_gradients_are_printed(tmp_path, capfd) -> None:
    ir, _ = inspection.program(tmp_path)
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
    printed = capfd.readouterr().err
    assert re.findall(r"(\w+): ?(\[.*?\])", printed) == [
        ("doubled", "[0. 2. 4.]"),
        ("doubled_gradient", "[0. 4. 8.]"),
    ]


def test_graphs_are_drawn_when_asked(tmp_path) -> None:
    ir, _ = inspection.program(tmp_path)
    popxl.Session(ir, "ipu_model")
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn.keys() == {"forward.dot", "Final.dot"}
    assert all(text.startswith("digraph") for text in drawn.values())
    assert all("program.layer_subgraph(0)" in text for text in drawn.values())


def test_the_environment_may_ask_for_drawings(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("POPART_DOT_CHECKS", "FWD0:ALL")
    ir = popxl.Ir()
    ir._pb_ir.getSessionOptions().logDir = str(tmp_path)
    popxl.Session(ir, "ipu_model")
    assert {path.name for path in tmp_path.iterdir()} == {"Final.dot"}
