"""The figures are the script's, can be read, and show what the program does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.transforms import Bbox

import popxl
from imgs.draw import draw_figures
from imgs.figures import activation_rows, replica_grid, rts_groups, step_timeline
from imgs.style import PLAIN, SHARPNESS, WIDTH, Area, Canvas
from modelling.layers import ParallelGroups
from modelling.phases import LossPhase, Phase
from modelling.phases.phase_optimizer import PhaseOptimizer
from modelling.phases.training import build_training_program
from modelling.t5.model import FAMILY
from tests.modelling.harness import small_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "imgs"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
LARGEST = 200_000  # bytes of a file
SAME = 0.05  # of a colour's range: less is the rounding of another machine
NAMES = sorted(path.stem for path in (FOLDER / "figures").glob("*.py"))


@pytest.fixture(scope="module")
def canvases() -> dict[str, Canvas]:
    return dict(draw_figures())


# ---- files --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_the_committed_file_is_what_the_script_draws(name, canvases, tmp_path):
    committed, new = FOLDER / f"{name}.png", tmp_path / "new.png"
    canvases[name].save(new)
    shown, expected = imread(committed), imread(new)
    assert shown.shape == expected.shape, "run: python3 -m imgs.draw"
    assert np.abs(shown - expected).max() < SAME, "run: python3 -m imgs.draw"
    assert shown.shape[1] == WIDTH * SHARPNESS
    assert committed.stat().st_size < LARGEST


def images(page: Path) -> list[tuple[str, Path]]:
    found = IMAGE.findall(page.read_text(encoding="utf-8"))
    return [(words, (page.parent / file).resolve()) for words, file in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_images_of_a_page_exist_and_are_described(page):
    for words, file in images(page):
        assert file.is_file(), file
        assert len(words) > 20, f"{file.name} needs words for those who cannot see it"


def test_every_figure_is_shown_and_every_file_is_drawn():
    shown = {file for page in PAGES for _, file in images(page)}
    files = {FOLDER / f"{name}.png" for name in NAMES}
    assert {file for file in shown if file.parent == FOLDER} == files
    assert set(FOLDER.glob("*.png")) == files


# ---- legibility ---------------------------------------------------------------------------------
def text_boxes(canvas: Canvas) -> list[tuple[str, Bbox]]:
    """Returns each text and its bounding box, in pixels from the top left corner."""
    canvas.figure.draw_without_rendering()
    to_page = canvas.figure.axes[0].transData.inverted()
    around = [(t.get_text(), t.get_window_extent().transformed(to_page)) for t in canvas.words]
    return [(words, Bbox([[b.xmin, b.ymin], [b.xmax, b.ymax]])) for words, b in around]


def as_box(area: Area) -> Bbox:
    return Bbox([[area.left, area.top], [area.right, area.bottom]])


def are_apart(a: Bbox, b: Bbox, space: float = 0.0) -> bool:
    return (
        a.x0 >= b.x1 + space or b.x0 >= a.x1 + space or a.y0 >= b.y1 + space or b.y0 >= a.y1 + space
    )


def is_within(inner: Bbox, outer: Bbox, margin: float) -> bool:
    return (
        inner.x0 >= outer.x0 + margin
        and inner.x1 <= outer.x1 - margin
        and inner.y0 >= outer.y0 + margin
        and inner.y1 <= outer.y1 - margin
    )


def find_faults(canvas: Canvas) -> list[str]:
    """Returns what makes a figure hard to read."""
    words, boxes = text_boxes(canvas), [as_box(area) for area in canvas.boxes]
    page = Bbox([[0, 0], [WIDTH, canvas.height]])
    found = [f"{text!r} leaves the page" for text, box in words if not is_within(box, page, 3)]
    found += [f"{a!r} overlaps {b!r}" for (a, x), (b, y) in itertools.combinations(words, 2)
              if not are_apart(x, y, 1)]  # fmt: skip
    found += [f"{text!r} crosses the border of a box" for text, box in words for frame in boxes
              if not are_apart(box, frame) and not is_within(box, frame, 1)]  # fmt: skip
    for corners in canvas.lines:
        for (x0, y0), (x1, y1) in itertools.pairwise(corners):
            line = Bbox([[min(x0, x1), min(y0, y1)], [max(x0, x1), max(y0, y1)]])  # axis-parallel
            found += [
                f"a line crosses {text!r}" for text, box in words if not are_apart(line, box, 1)
            ]
    for points in canvas.curves:
        for start, end in itertools.pairwise(points):
            way = np.linspace(start, end, 200)
            found += [f"a curve crosses {text!r}" for text, box in words
                      if any(box.contains(x, y) for x, y in way)]  # fmt: skip
    return found


@pytest.mark.parametrize("name", NAMES)
def test_words_do_not_overlap_anything(name, canvases):
    assert not find_faults(canvases[name])


def test_lines_are_horizontal_or_vertical(canvases):
    """The check above takes a line for its bounding box."""
    for canvas in canvases.values():
        for corners in canvas.lines:
            for (x0, y0), (x1, y1) in itertools.pairwise(corners):
                assert x0 == x1 or y0 == y1


def test_the_check_finds_faults():
    canvas = Canvas(100)
    for at, words in (((400, 50), "one"), ((410, 50), "two"), ((2, 20), "three")):
        canvas.text(at, words)
    canvas.box(Area(600, 40, 20, 20), "four, five")
    canvas.text((200, 50), "six")
    canvas.arrow((150, 50), (250, 50))
    canvas.text((700, 50), "seven")
    canvas.curve([(650, 20), (750, 80)], PLAIN)
    assert find_faults(canvas) == [
        "'three' leaves the page",
        "'one' overlaps 'two'",
        "'four, five' crosses the border of a box",
        "a line crosses 'six'",
        "a curve crosses 'seven'",
    ]


# ---- truth --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def program() -> dict[str, list]:
    """Returns the phases of a T5 training program in their order, and the rows of its buffers."""
    layers, steps = activation_rows.LAYERS, activation_rows.MICRO_BATCHES
    config = small_config(layers=layers)
    config = replace(config, training=replace(config.training, global_batch_size=steps))
    found: dict[str, list] = {"forward": [], "backward": [], "update": []}
    with pytest.MonkeyPatch.context() as patch:
        for kind, method in itertools.product((Phase, LossPhase), ("forward", "backward")):
            if method in vars(kind):
                record(patch, kind, method, lambda phase, m=method: found[m].append(phase.name))
        record(patch, PhaseOptimizer, "update", lambda store: found["update"].append(store.facts))
        built = build_training_program(config, FAMILY.build_phases)
    owners = [name for name, entries in built.variables.items() if entries]
    between = [b for b in built.ir.remote_buffers if (b.kind or "").endswith("between layers")]
    return {**found, "owners": owners, "rows": [b.entries // steps for b in between]}


def record(patch: pytest.MonkeyPatch, kind: type, method: str, note: Callable) -> None:
    original = getattr(kind, method)

    def noted(self, *args, **kwargs):
        note(self)
        return original(self, *args, **kwargs)

    patch.setattr(kind, method, noted)


def test_the_timeline_is_the_programs(program):
    names = list(step_timeline.PHASES)
    # The head has its forward pass in its backward one; alone it runs only to evaluate.
    assert program["forward"] == [*names, step_timeline.HEAD]
    assert program["backward"] == [step_timeline.HEAD, *reversed(names)]
    assert program["owners"] == step_timeline.OWNERS
    assert len(program["update"]) == len(step_timeline.OWNERS)


def test_the_rows_are_the_programs(program):
    layers = activation_rows.LAYERS
    assert sorted(program["rows"], reverse=True) == [layers + 2] * 2 + [layers + 1] * 2


def test_the_grids_are_the_programs():
    ir = popxl.Ir(replication=replica_grid.COPIES * replica_grid.SHARDS)
    with ir.main_graph:
        groups = ParallelGroups.from_current_ir(replica_grid.SHARDS)
    shared_over = (groups.sharded, groups.replicated, groups.tp)
    for sharing, grouping in zip(rts_groups.DISTRIBUTIONS, shared_over, strict=True):
        for copy, shard in itertools.product(range(2), range(4)):
            replica = replica_grid.replica_index(copy, shard)
            tensor, part = sharing.holds(copy, shard)
            members = grouping.groups[tensor or 0]
            assert members[part] == replica, sharing.title
