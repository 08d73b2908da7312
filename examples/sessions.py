"""Two programs that share weights: one trains, the other evaluates in between."""

from __future__ import annotations

import popxl
import popxl_addons as addons
from examples.digits import PIXELS, digits
from examples.mnist import BATCH, Net, train_program
from popxl import ops


def evaluation_program(rows: int):
    """The network without gradients, for `rows` images at a time."""
    ir = popxl.Ir()
    with ir.main_graph:
        img_stream = popxl.h2d_stream((rows, PIXELS), popxl.float32, name="image")
        x = ops.host_load(img_stream)
        facts, graph = Net().create_graph(x)
        variables = facts.init(empty=True)
        (logits,) = graph.bind(variables).call(x)
        class_stream = addons.host_store(ops.argmax(logits, dim=-1))
    return ir, img_stream, class_stream, variables


def train_and_evaluate(rounds: int, steps: int) -> list[float]:
    """Accuracy on other images after each round of `steps` training steps."""
    train_ir, train_inputs, _, train_variables = train_program()
    test_ir, test_images, classes, test_variables = evaluation_program(200)
    images, labels = digits(rounds * steps * BATCH)
    new_images, new_labels = digits(200, seed=1)

    train_session = popxl.Session(train_ir, "ipu_model")
    test_session = popxl.Session(test_ir, "ipu_model")
    accuracies = []
    for r in range(rounds):
        with train_session:
            for i in range(r * steps, (r + 1) * steps):
                batch = slice(i * BATCH, (i + 1) * BATCH)
                data = (images[batch], labels[batch])
                train_session.run(dict(zip(train_inputs, data, strict=True)))
        # The names of the variables say which weight belongs to which.
        weights = train_session.get_tensors_data(train_variables.tensors)
        to_test = train_variables.to_mapping(test_variables)
        test_session.write_variables_data({to_test[t]: data for t, data in weights.items()})
        with test_session:
            predicted = test_session.run({test_images: new_images})[classes]
        accuracies.append(float((predicted == new_labels).mean()))
    return accuracies


if __name__ == "__main__":
    print([f"{a:.0%}" for a in train_and_evaluate(3, 40)])
