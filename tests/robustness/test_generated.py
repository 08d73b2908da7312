"""Generated mistakes: every one ends in acceptance or in one sentence, soon and in little memory.

Every flag and every field of every section gets bad values, and every file that is read is damaged
at random. The larger numbers of cases are marked slow.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from checkpoints import CheckpointStore
from config.base import config_fields
from config.families import FAMILIES
from config.t5 import T5Config
from data.task import SAMPLE_FOLDER
from files.yaml_files import dump_yaml
from huggingface.model_folders import write_hf_directory
from modelling.model_family import get_family
from run.model_weights import MODEL
from tests.robustness.damage import (
    damaged,
    environments,
    json_values,
    replaced,
    scalars,
    texts,
    yaml_values,
)
from tests.robustness.forks import Forks, Outcome
from tests.slow import slow

MAX_SECONDS, MAX_MEGABYTES, LONGEST = 1.0, 200, 300
PATH_OPTIONS = ("--save", "--run-dir", "--save-hf", "--plan-json", "--plan-picture")
SMALL = {
    "family": "t5",
    "data": {"dataset": "sample"},
    "model": {"layers": 1, "hidden_size": 8, "d_ff": 8, "embedding": {"vocab_size": 16},
              "attention": {"heads": 2, "d_kv": 4}},
    "training": {"global_batch_size": 4},
}  # fmt: skip

# A failing case may be a whole file.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")


def number(quick: int, thorough: int) -> pytest.MarkDecorator:
    """As many cases in every run of the tests, and so many in the slow ones."""
    return pytest.mark.parametrize("cases", [quick, slow(thorough)])


dear, middling, cheap = number(3, 300), number(3, 400), number(5, 1500)


@pytest.fixture(scope="module")
def forks(tmp_path_factory) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("here")) as server:
        yield server


def examine(cases: int, drawn: st.SearchStrategy, check: Callable[..., None]) -> None:
    """Call `check` with as many drawn values."""

    @settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def run(value: object) -> None:
        check(value)

    run()


def check_outcome(
    outcome: Outcome, codes: tuple[int, ...] = (0, 2), seconds: float = MAX_SECONDS
) -> None:
    """Accepted, or refused in one sentence; soon and in little memory."""
    assert "Traceback" not in outcome.text
    assert outcome.code in codes, outcome
    if outcome.code == 2:
        *_, last = outcome.text.rstrip("\n").split("\n")
        assert last.startswith("error: ")
        assert len(last) <= LONGEST
        assert last.isprintable()
    assert outcome.seconds < seconds
    assert outcome.megabytes < MAX_MEGABYTES


# ---- command lines and configurations ------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
@dear
def test_every_flag(family, cases, forks, tmp_path):
    names = [leaf.path for leaf in config_fields(FAMILIES[family].config)]
    presets = {"llama": "qwen3_tiny", "t5": "tiny"}
    presets |= {name: f"{name}_tiny" for name in ("bart", "t5gemma", "gptj")}
    places = {
        "run_finetuning": ["--run-dir", str(tmp_path / "run")],
        "run_validation": ["--out", str(tmp_path / "out")],
        "run_export": ["--save-hf", str(tmp_path / "hf")],
    }
    flags = st.lists(st.tuples(st.sampled_from(names), texts), min_size=1, max_size=3)

    def check(drawn):
        script, pairs = drawn
        given = [f"--{name}={text}" for name, text in pairs]
        arguments = ["--config", presets[family], *given, *places[script]]
        check_outcome(forks.run("command", script=script, arguments=arguments))

    examine(cases, st.tuples(st.sampled_from(sorted(places)), flags), check)


@dear
def test_whole_command_lines(cases, forks, tmp_path):
    some = ["--config", "tiny", "--wandb", "--model", "--steps", "--eval", "--save"]
    words = st.one_of(texts, texts.map(lambda text: f"--{text}"), st.sampled_from(some))
    place = ["--run-dir", str(tmp_path / "run")]

    def check(arguments):
        check_outcome(forks.run("command", script="run_finetuning", arguments=[*arguments, *place]))

    examine(cases, st.lists(words, max_size=6), check)


@dear
def test_places_to_write_to(cases, forks, tmp_path):
    (tmp_path / "file").write_text("x")
    here = [tmp_path, tmp_path / "file", tmp_path / "file" / "x", tmp_path / ("n" * 256)]
    elsewhere = ["/proc/x", "/proc/1/x/y", "/dev/null/x", "/dev/full", "/sys/x", "a/" * 2100]
    odd = st.text(alphabet="\0\n\t \ud800ab/.", max_size=6)
    places = st.one_of(
        st.sampled_from([*map(str, here), *elsewhere, "", " ", "\0", "\udcff"]),
        odd.map(lambda text: f"{tmp_path}/{text}"),
    )

    def check(drawn):
        option, text = drawn
        arguments = ["--config", "tiny", "--run-dir", str(tmp_path / "run"), f"{option}={text}"]
        if option.startswith("--plan"):  # a good place would be planned for
            arguments += ["--layers", "0"]
        check_outcome(forks.run("command", script="run_finetuning", arguments=arguments))

    examine(cases, st.tuples(st.sampled_from(PATH_OPTIONS), places), check)


@dear
def test_configurations_in_yaml(cases, forks, tmp_path):
    config = T5Config.from_dict({"family": "t5", "data": {"dataset": "sample"}})
    lines = dump_yaml(config.to_dict()).splitlines()
    path = tmp_path / "config.yml"

    @st.composite
    def files(draw: st.DrawFn) -> bytes:
        if draw(st.integers(0, 3)) == 0:
            return draw(damaged("\n".join(lines).encode()))
        at = draw(st.integers(0, len(lines) - 1))
        name = lines[at].partition(":")[0]
        new = f"{name}: {draw(yaml_values)}"
        return "\n".join([*lines[:at], new, *lines[at + 1 :]]).encode(errors="replace")

    def check(content):
        path.write_bytes(content)
        arguments = ["--config", str(path), "--run-dir", str(tmp_path / "run")]
        outcome = forks.run("command", script="run_finetuning", arguments=arguments)
        check_outcome(outcome)

    examine(cases, files(), check)


@number(2, 300)
def test_options_of_every_script(cases, forks, tmp_path):
    """Those that are no fields; their names are those of the help text."""
    names = {}
    for script in ("finetuning", "validation", "export", "generation", "inference"):
        shown = forks.run("command", script=f"run_{script}", arguments=["--help-all"]).text
        names[script] = re.findall(r"^  (?:-h, )?(--[a-z-]+)(?= |$)", shown, re.MULTILINE)
        assert {"--config", "--processes", "--coordinator"} <= {*names[script]}
    options = st.sampled_from(
        [(s, name) for s in names for name in names[s] if name != "--process"]
    )
    words = st.lists(texts.filter(lambda text: text not in ("2", "1:30")), max_size=2)
    place = {"finetuning": ["--run-dir", str(tmp_path / "run")]}

    def check(drawn):
        (script, option), values, joined = drawn
        given = [f"{option}={values[0]}"] if joined and values else [option, *values]
        arguments = ["--config", "tiny", *given, *place.get(script, [])]
        outcome = forks.run("command", script=f"run_{script}", arguments=arguments)
        check_outcome(outcome, seconds=10.0)  # a plan may be asked for

    examine(cases, st.tuples(options, words, st.booleans()), check)


@number(2, 200)
def test_environment_variables(cases, forks, tmp_path):
    """What JAX and XLA read is tried in a process of its own, which takes longer."""
    arguments = ["--config", "tiny", "--run-dir", str(tmp_path / "run")]

    def check(environment):
        outcome = forks.run(
            "command", script="run_finetuning", arguments=arguments, environment=environment
        )
        check_outcome(outcome, seconds=10.0)

    examine(cases, environments, check)


@number(2, 200)
def test_environment_variables_of_programs(cases, forks):
    examine(cases, environments, lambda environment: check_outcome(
        forks.run("session", environment=environment), seconds=10.0
    ))  # fmt: skip


# ---- checkpoints and models ----------------------------------------------------------------------
@pytest.fixture
def model(tmp_path) -> Path:
    """A configuration, to load with; whatever is to be loaded goes to `load`."""
    (tmp_path / "config.yml").write_text(dump_yaml(SMALL))
    return tmp_path


def weights(seed: int = 1) -> dict[str, np.ndarray]:
    return dict(get_family(CONFIG).weight_map(CONFIG).init_weights(seed))


CONFIG = T5Config.from_dict(SMALL)
DATA = {"seed": 1, "epoch": 0, "position": 4, "samples": 10}
METADATA = {"data": DATA, "skipped_steps": 0, MODEL: get_family(CONFIG).to_config_json(CONFIG)}


def save_steps(path: Path) -> Path:
    """Checkpoints of two steps with different weights. Returns the folder of the newest."""
    with CheckpointStore(path) as store:
        for step in (1, 2):
            tensors = weights(step)
            for slot in ("first_order", "second_order"):
                tensors |= {f"optimizer/{slot}/{n}": w for n, w in weights(step).items()}
            store.save(step, tensors, METADATA, wait=True, texts={"config.yml": dump_yaml(SMALL)})
    (newest,) = path.glob("*-step-2")
    return newest


@middling
def test_manifests_with_a_right_digest(cases, forks, model):
    """Whoever can write a manifest can make a digest; what it says is still checked."""
    path = save_steps(model / "load") / "manifest.json"
    content = json.loads(path.read_text())["content"]
    works = st.sampled_from(["start", "weights"])

    def check(drawn):
        work, found = drawn
        digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({"sha256": digest, "content": found}))
        check_outcome(forks.run(work, path=str(model)))

    examine(cases, st.tuples(works, replaced(content)), check)


@middling
def test_files_of_a_checkpoint(cases, forks, model):
    """What comes back is what was saved: the newest step, or the one before with a warning."""
    newest = save_steps(model / "load")
    files = {path: path.read_bytes() for path in newest.iterdir()}
    whole = forks.run("start", path=str(model)).text
    (newest / "manifest.json").unlink()
    *_, before = forks.run("start", path=str(model)).text.splitlines()
    assert before not in whole

    @st.composite
    def file(draw: st.DrawFn) -> tuple[Path, bytes]:
        path = draw(st.sampled_from(sorted(files)))
        return path, draw(damaged(files[path]))

    def check(drawn):
        path, content = drawn
        path.write_bytes(content)
        outcome = forks.run("start", path=str(model))
        path.write_bytes(files[path])
        check_outcome(outcome, codes=(0,))
        if outcome.text != whole:
            assert "the checkpoint of step 2 is damaged" in outcome.text
            assert outcome.text.splitlines()[-1] == before

    (newest / "manifest.json").write_bytes(files[newest / "manifest.json"])
    examine(cases, file(), check)


@middling
def test_files_of_a_hugging_face_model(cases, forks, model):
    folder = model / "load"
    described = get_family(CONFIG).to_config_json(CONFIG)
    write_hf_directory(folder, weights(), described, shard_bytes=2000)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    _try_changes(cases, files, lambda: forks.run("weights", path=str(model)))


def _try_changes(cases: int, files: dict[Path, bytes], run: Callable[[], Outcome]) -> None:
    """Run with one of the files changed: damaged, or other JSON."""

    @st.composite
    def changed(draw: st.DrawFn) -> tuple[Path, bytes]:
        path = draw(st.sampled_from(sorted(files)))
        if path.suffix == ".json" and draw(st.booleans()):
            return path, json.dumps(draw(replaced(json.loads(files[path])))).encode()
        return path, draw(damaged(files[path]))

    def check(drawn: tuple[Path, bytes]) -> None:
        path, content = drawn
        path.write_bytes(content)
        outcome = run()
        path.write_bytes(files[path])
        check_outcome(outcome)

    examine(cases, changed(), check)


# ---- data, tokenizers, records -------------------------------------------------------------------
@middling
def test_files_of_a_tokenizer(cases, forks, tmp_path):
    folder = Path(shutil.copytree(SAMPLE_FOLDER / "t5_tokenizer", tmp_path / "tokenizer"))
    files = {path: path.read_bytes() for path in folder.iterdir() if path.suffix == ".json"}
    _try_changes(cases, files, lambda: forks.run("tokenizer", path=str(folder)))


@cheap
def test_rows_of_data(cases, forks, tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"premise": "a \u2028 b", "hypothesis": "c", "label": 1}

    @st.composite
    def content(draw: st.DrawFn) -> bytes:
        rows = [row] * 5
        rows[draw(st.integers(0, 4))] = draw(replaced(row))
        text = "\n".join(json.dumps(r, ensure_ascii=draw(st.booleans())) for r in rows)
        whole = text.encode(errors="replace")
        return draw(damaged(whole)) if draw(st.booleans()) else whole

    def check(drawn):
        path.write_bytes(drawn)
        outcome = forks.run("rows", path=str(path))
        check_outcome(outcome)
        assert outcome.code == 0 or str(path.name) in outcome.text

    examine(cases, content(), check)


HABITS = (
    *("text", "prompt", "completion", "instruction", "input", "output", "question", "answer"),
    *("query", "response", "messages", "conversations", "conversation", "chosen", "rejected"),
    *("system", "tools", "context", "label", "id", "weight", "", " ", "{", "a b", "\u202e"),
)
"""Columns as people name them."""


@cheap
def test_columns_of_every_habit(cases, forks, tmp_path):
    """Any columns with any values, in all kinds of files, for both shapes of samples."""
    message = st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool", "human", "", 1, None]),
            "content": st.one_of(st.text(max_size=8), json_values),
            "from": st.sampled_from(["human", "gpt", "system", "x"]),
            "value": st.one_of(st.text(max_size=8), scalars),
            "tool_calls": json_values,
            "weight": scalars,
        },
    )
    values = st.one_of(
        st.text(max_size=12), st.lists(message, max_size=4), json_values, st.just("{}{"), message
    )
    row = st.dictionaries(st.sampled_from(HABITS), values, min_size=1, max_size=4)
    rows = st.one_of(
        st.lists(row, min_size=1, max_size=4),
        row.map(lambda one: [one] * 3),
        st.tuples(row, row).map(lambda two: [two[0]] * 3 + [two[1]]),
    )

    def check(drawn):
        family, ending, written = drawn
        path = tmp_path.parent / f"rows{ending}"  # which messages name: the shorter, the better
        _write_rows(path, written)
        outcome = forks.run("own", family=family, path=str(path))
        check_outcome(outcome, seconds=5.0)

    kinds = st.sampled_from([".jsonl", ".json", ".csv", ".txt", ".parquet"])
    examine(cases, st.tuples(st.sampled_from(["t5", "llama"]), kinds, rows), check)


def _write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as the ending says; what Parquet has no form for becomes JSON Lines."""
    if path.suffix == ".csv":
        with path.open("w", newline="", errors="replace") as file:
            writer = csv.DictWriter(file, [*dict.fromkeys(name for row in rows for name in row)])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        except (pyarrow.ArrowException, OverflowError, UnicodeError):
            path.write_bytes(b"PAR1")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), errors="replace")
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n", errors="replace")


@cheap
def test_metrics(cases, forks, tmp_path):
    """A damaged record never stops a run, and no whole row is lost."""
    rows = [json.dumps({"step": i, "loss": 1.5, "odd": "nan"}).encode() for i in range(20)]
    path = tmp_path / "metrics.jsonl"

    def check(content):
        path.write_bytes(content)
        outcome = forks.run("metrics", path=str(tmp_path))
        check_outcome(outcome, codes=(0,))
        kept = set(path.read_bytes().split(b"\n"))
        assert {line for line in content.split(b"\n")[:-1] if line in rows} <= kept

    examine(cases, damaged(b"\n".join([*rows, b""])), check)


@middling
def test_what_a_lock_says(cases, forks, tmp_path):
    """The note in it is for people; the kernel has the lock."""
    note = b'{"process": 1, "host": "h", "since": "now"}'

    def check(content):
        (tmp_path / "writer.lock").write_bytes(content)
        check_outcome(forks.run("lock", path=str(tmp_path)), codes=(0,))

    examine(cases, damaged(note), check)
