"""Inspect a program: names, printed tensors, drawings of graphs."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import popxl
from popxl import ops


# Contexts are decorators as well, also where no program is being written.
@popxl.name_scope("scaled")
@popxl.in_sequence()
def scaled(x: popxl.Tensor, factor: float) -> popxl.Tensor:
    return ops.mul(x, popxl.constant(factor, x.dtype, name="factor"))


def program(folder: Path) -> tuple[popxl.Ir, list[str]]:
    """A program that prints a tensor and its gradient, and the names of its tensors."""
    ir = popxl.Ir()
    options = ir._pb_ir.getSessionOptions()
    options.dotChecks = {"forward", "final"}
    options.logDir = str(folder)
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.arange(3), popxl.float32, name="x")

        def layer(x: popxl.Tensor) -> popxl.Tensor:
            with popxl.name_scope("outer"):
                y = scaled(x, 2.0)
            y = ops.print_tensor(y, title="doubled", print_gradient=True)
            return ops.sum(y * y)

        graph = ir.create_graph(layer, x)
        gradient = popxl.transforms.autodiff(graph)
        call = ops.call_with_info(graph, x)
        ops.call(gradient.graph, 1.0, inputs_dict=gradient.inputs_dict(call))
    ir.dot_checkpoint("forward", folder)
    return ir, [t.id for t in graph.tensors]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        ir, names = program(Path(folder))
        print(names, ir.main_graph, sep="\n")
        with popxl.Session(ir, "ipu_model") as session:
            session.run()
        print(sorted(path.name for path in Path(folder).iterdir()))
