"""Which faults in the production code do the default tests not see?

    python -m tests.mutants map [ARGUMENTS OF PYTEST]   # once: which lines each test runs
    python -m tests.mutants run --count 200 --seed 0    # make faults, one at a time
    python -m tests.mutants show                        # the survivors

`map` runs the tests; called again with other tests, it adds to the map. `run` makes each fault in
a copy of the tree and runs the tests that reach its line, the quickest first, until one fails. It
goes on where it stopped; `--again` asks all again that were not caught. `undecided` means that
tests were left to run when the `--seconds` of one fault were used up. What survives is either a gap
of the tests or no fault at all: `equivalent.txt` lists the latter, each with its reason. Everything
is kept in `.mutants/`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.changes import Change, changes
from tests.test_limits import PRODUCT

ROOT = Path(__file__).parent.parent.parent
BATCHES = (15, 60, 10_000)  # tests in one run of pytest
QUIETLY = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
QUIETLY += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # what was imported before the fork
SLOWER = 6  # than when the map was made, a fault may make them


# ---- what reaches a line ------------------------------------------------------------------------
class Map:
    """Tests by the lines that they run, and their seconds."""

    def __init__(self, folder: Path):
        import coverage

        self.seconds: dict[str, float] = defaultdict(float)
        failed = set()
        for line in (folder / "seconds.jsonl").read_text().splitlines():
            row = json.loads(line)
            self.seconds[row["test"]] += row["seconds"]
            if row["outcome"] != "passed":
                failed.add(row["test"])
        for test in failed:
            del self.seconds[test]
        self.of_file = defaultdict(list)
        for test in self.seconds:
            self.of_file[test.partition("::")[0]].append(test)
        whole = coverage.Coverage(data_file=str(folder / "lines"))
        whole.combine([str(folder)], keep=True)
        self.data = whole.get_data()

    @cache  # noqa: B019 - one map lives as long as the program
    def lines(self, file: str) -> dict[int, set[str]]:
        """A fixture's lines count for all tests of a file."""
        found: dict[int, set[str]] = defaultdict(set)
        for name in self.data.measured_files():  # relative or, of other processes, not
            if name == file or (name.startswith("/") and name.endswith(f"/{file}")):
                for line, contexts in self.data.contexts_by_lineno(name).items():
                    found[line].update(t for c in contexts for t in self._tests(c.strip("|")))
        return found

    def _tests(self, context: str) -> list[str]:
        return [context] if context in self.seconds else self.of_file.get(context, [])

    def tests(self, file: str, line: int) -> list[str]:
        """Tests that run a line; for one that imports run, those that run what `users_of` says.
        Those that are named after the file come first, and then the quickest. The other tests of
        their files follow: what a file computes once and keeps counts for whoever asked first."""
        lines = self.lines(file)
        reach = set().union(*(lines.get(user, ()) for user in users_of(ROOT / file, line)))
        if not reach:  # or in a process that ended at once, without a word of what it ran
            room = Path("tests") / Path(file.removeprefix("runtime/src/")).parent
            reach = {test for test in self.seconds if test.startswith(f"{room.as_posix()}/")}
        files = {test.partition("::")[0] for test in reach}
        others = {test for name in files for test in self.of_file[name]} - reach
        named = f"test_{Path(file).stem.strip('_')}"
        functions = {test.partition("[")[0] for test in reach}

        def order(test: str) -> tuple[object, ...]:
            near = named in test if test in reach else test.partition("[")[0] in functions
            return test not in reach, not near, self.seconds[test], test

        return sorted(reach | others, key=order)


def users_of(path: Path, line: int) -> range:
    """The lines whose tests see a fault in a line: itself in a body of a function, the body for a
    signature, whose defaults are computed on importing, and the whole file for what is outside."""
    source = path.read_text()
    lines = range(1, source.count("\n") + 2)
    for node in ast.walk(ast.parse(source)):  # outer functions first
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            body = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
            return range(line, line + 1) if line in body else body
    return lines


def make_map(folder: Path, arguments: list[str]) -> int:
    environment = {**os.environ, "MUTANTS_FOLDER": str(folder.resolve())}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.cover", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


# ---- faults -------------------------------------------------------------------------------------
def drawn(count: int, seed: int) -> Iterator[tuple[str, Change]]:
    """Random changes of the production code, the same for a seed and a tree."""
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in PRODUCT}
    all_ = [(file, change) for file in sorted(files) for change in changes(files[file])]
    yield from random.Random(seed).sample(all_, count)


def text_of(source: bytes, change: Change) -> tuple[str, str]:
    """A changed line, before and after."""
    changed = change.applied(source).decode().splitlines()
    return source.decode().splitlines()[change.line - 1].strip(), changed[change.line - 1].strip()


@cache
def equivalents() -> set[tuple[str, ...]]:
    rows = (ROOT / "tests/mutants/equivalent.txt").read_text().splitlines()
    rows = [row for row in rows if row and not row.startswith(("#", " "))]
    return {tuple(part.strip() for part in row.split(" | ")) for row in rows}


# ---- runs of pytest -----------------------------------------------------------------------------
def run_tests(tree: Path, tests: list[str], limit: float) -> str:
    """What pytest says, in a process with everything imported but our code: 'passed', 'too slow',
    or the first test that failed."""
    log, pid = tree / "pytest.log", os.fork()
    if pid == 0:
        try:
            _be_pytest(tree, tests, log)
        finally:  # never back into the caller
            os._exit(70)
    end = time.monotonic() + limit
    while (status := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and what it has started
    if status[0] == 0:
        os.waitpid(pid, 0)
        return "too slow"
    if status[1] == 0:
        return "passed"
    lines = log.read_text().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"pytest ended with {status[1]}: {lines[-1:]}"


def _be_pytest(tree: Path, tests: list[str], log: Path) -> None:
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.setpgid(0, 0)
    os.chdir(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(p for p in sys.path if p and not p.startswith(str(ROOT)))]
    os.environ["PYTHONPATH"] = os.pathsep.join([f"{tree}/runtime/src", str(tree)])
    try:
        code = int(pytest.main([*QUIETLY, *tests]))
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def verdict(tree: Path, tests: list[str], seconds: dict[str, float], most: float) -> dict:
    """What the tests that reach a fault say of it; at most so many seconds of them."""
    total, within = 0.0, []
    for test in tests:
        if total + seconds[test] <= most or not within:
            total += seconds[test]
            within.append(test)
    if not within:
        return {"verdict": "not reached"}
    done = 0
    for size in BATCHES:
        batch = sorted(within[done : done + size])
        done += len(batch)
        time_ = sum(seconds[test] for test in batch)
        said = run_tests(tree, batch, 60 + SLOWER * time_) if batch else "passed"
        if said != "passed":
            return {"verdict": "caught", "by": said, "tests": done}
    left = len(tests) - done
    return {"verdict": "undecided" if left else "survived", "tests": done, "left_out": left}


def run(folder: Path, options: argparse.Namespace) -> None:
    # What tests import takes longer than most of them; a fork has it already.
    import jax, torch, transformers  # noqa: E401, F401, I001

    results, reached = folder / "results.jsonl", Map(folder)
    final = ("caught", "equivalent", *(() if options.again else ("survived", "undecided")))
    known = {row["id"] for row in _rows(results) if row["verdict"] in final}
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as top:
        tree = Path(top) / "tree"
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
        cheapest = sorted(reached.seconds, key=reached.seconds.__getitem__)[:20]
        said = run_tests(tree, cheapest, 300)
        assert said == "passed", f"without a fault: {said}"
        for i, (file, change) in enumerate(drawn(options.count, options.seed)):
            if f"{options.seed}/{i}" in known or time.monotonic() > end:
                continue
            source = (ROOT / file).read_bytes()
            old, new = text_of(source, change)
            row = {
                "id": f"{options.seed}/{i}",
                "file": file,
                "line": change.line,
                "kind": change.kind,
            }
            row |= {"old": old, "new": new}
            if (file, old, new) in equivalents():
                row["verdict"] = "equivalent"
            else:
                (tree / file).write_bytes(change.applied(source))
                tests = reached.tests(file, change.line)
                row |= verdict(tree, tests, reached.seconds, options.seconds)
                (tree / file).write_bytes(source)
            print(json.dumps(row), flush=True)
            with results.open("a") as out:
                out.write(json.dumps(row) + "\n")


def _rows(results: Path) -> list[dict]:
    """The last of each fault."""
    lines = results.read_text().splitlines() if results.exists() else []
    return list({(row := json.loads(line))["id"]: row for line in lines}.values())


def show(folder: Path) -> None:
    rows = _rows(folder / "results.jsonl")
    for row in rows:
        if row["verdict"] not in ("caught", "equivalent"):
            print(f"{row['file']}:{row['line']} ({row['kind']}, {row['verdict']})")
            print(f"  - {row['old']}\n  + {row['new']}")
    print(dict(Counter(row["verdict"] for row in rows)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("map", "run", "show"))
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=90, help="of tests for one fault, at most")
    parser.add_argument("--minutes", type=float, default=600, help="then begin no other fault")
    parser.add_argument("--again", action="store_true", help="what was not caught, too")
    options, rest = parser.parse_known_args()
    if options.what == "map":
        return make_map(options.folder, rest)
    if options.what == "run":
        run(options.folder, options)
    show(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
