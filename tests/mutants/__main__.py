"""Which faults in the production code do the default tests not see?

    python -m tests.mutants map --count 200 --seed 0    # draw faults; which tests reach each
    python -m tests.mutants run                         # make them, one at a time
    python -m tests.mutants show                        # the survivors

`map` draws random faults (`--under PATH`: in the files of a folder) and runs the tests once in a
copy of the tree that has a probe in front of each; further arguments are pytest's. It takes as long
as the tests. `run` makes each fault in a copy of the tree and runs the tests that reach it, the
quickest first, until one fails: a few seconds for what the first ones catch, up to `--seconds` of
tests for the rest. For 200 faults both together should take an hour on 2 cores. It goes on where
it stopped, and asks again what tests caught that are gone or slow by now; `--again`: all that was
not caught, too. A map stays valid while the drawn files are as they were, whatever else changes;
faults in others are `stale`. `undecided` means that tests were left to run when the `--seconds` of
one fault were used up. What survives is either a gap of the tests or no fault at all:
`equivalent.txt` lists the latter, each with its reason. Everything is kept in `.mutants/`.
"""

from __future__ import annotations

import argparse
import hashlib
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
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.changes import Change, changes
from tests.mutants.probes import with_probes
from tests.test_limits import PRODUCT

ROOT = Path(__file__).parent.parent.parent
BATCHES = (15, 60, 10_000)  # tests in one run of pytest
QUIETLY = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
QUIETLY += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # what was imported before the fork
SLOWER = 6  # than when the map was made, a fault may make them


# ---- faults -------------------------------------------------------------------------------------
def drawn(count: int, seed: int, under: str) -> Iterator[tuple[str, Change]]:
    """Random changes of the production code, the same for a seed and a tree."""
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in PRODUCT}
    files = {name: files[name] for name in sorted(files) if name.startswith(under)}
    all_ = [(file, change) for file, source in files.items() for change in changes(source)]
    yield from random.Random(seed).sample(all_, min(count, len(all_)))


def as_row(number: int, seed: int, file: str, change: Change) -> dict:
    """All that is to be known of a fault; what it changed is there to be read."""
    source = (ROOT / file).read_bytes()
    changed = change.applied(source).decode().splitlines()
    return {
        "id": f"{seed}/{number}", "file": file, "digest": hashlib.sha256(source).hexdigest(),
        **vars(change),
        "before": source.decode().splitlines()[change.line - 1].strip(),
        "after": changed[change.line - 1].strip(),
    }  # fmt: skip


@cache
def equivalents() -> set[tuple[str, ...]]:
    rows = (ROOT / "tests/mutants/equivalent.txt").read_text().splitlines()
    rows = [row for row in rows if row and not row.startswith(("#", " "))]
    return {tuple(part.strip() for part in row.split(" | ")) for row in rows}


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tree."""
    with tempfile.TemporaryDirectory() as top:
        tree = Path(top) / "tree"
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
            if (ROOT / name).exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tree / name)
        yield tree


# ---- what reaches a fault -----------------------------------------------------------------------
def make_map(folder: Path, options: argparse.Namespace, arguments: list[str]) -> int:
    """Draw faults, and run the tests with a probe at each."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    faults = [
        as_row(i, options.seed, *fault)
        for i, fault in enumerate(drawn(options.count, options.seed, options.under))
    ]
    (folder / "faults.jsonl").write_text("".join(json.dumps(row) + "\n" for row in faults))
    lines: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for i, row in enumerate(faults):
        lines[row["file"]][i] = [row["line"]]
    with copied() as tree:
        for file, probes in lines.items():
            (tree / file).write_bytes(with_probes((ROOT / file).read_bytes(), probes))
        shutil.copy(Path(__file__).with_name("reached.py"), tree / "runtime/src/mutants_reached.py")
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([f"{tree}/runtime/src", str(tree)]),
            "MUTANTS_REACHED": str(folder.resolve() / "reached.txt"),
            "MUTANTS_SECONDS": str(folder.resolve() / "seconds.jsonl"),
        }  # fmt: skip
        workers = ["-n", str(options.workers), "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", *workers]
        command += ["-p", "tests.mutants.plugin", *arguments]
        return subprocess.run(command, cwd=tree, env=environment, check=False).returncode


def default_tests() -> set[str]:
    """Those that there are now."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line for line in said.splitlines() if "::" in line}


class Map:
    """Tests by the faults that they reach, and their seconds; of `tests` alone."""

    def __init__(self, folder: Path, tests: set[str]):
        self.seconds: dict[str, float] = defaultdict(float)
        left_out = set()
        for row in _read(folder / "seconds.jsonl"):
            self.seconds[row["test"]] += row["seconds"]
            if row["outcome"] != "passed" or row["test"] not in tests:
                left_out.add(row["test"])
        for test in left_out:
            del self.seconds[test]
        self.of_file = defaultdict(list)
        for test in self.seconds:
            self.of_file[test.partition("::")[0]].append(test)
        self.faults = _read(folder / "faults.jsonl")
        self.reach: dict[str, set[str]] = defaultdict(set)
        for line in (folder / "reached.txt").read_text().splitlines():
            probe, _, context = line.partition("\t")
            tests = [context] if context in self.seconds else self.of_file.get(context, [])
            self.reach[self.faults[int(probe)]["id"]].update(tests)

    def tests(self, fault: dict) -> list[str]:
        """Tests that reach a fault. Those that are named after its file come first, and then the
        quickest. The other tests of their files follow: what a file computes once and keeps counts
        for whoever asked first. So do those of the fault's room: a process that ends at once, or
        has an environment of its own, does not say what it ran."""
        file, reach = Path(fault["file"].removeprefix("runtime/src/")), self.reach[fault["id"]]
        room = f"{(Path('tests') / file.parent).as_posix()}/"
        files = {test.partition("::")[0] for test in reach}
        files.update(name for name in self.of_file if name.startswith(room))
        others = {test for name in files for test in self.of_file[name]} - reach
        named = f"test_{file.stem.strip('_')}"
        functions = {test.partition("[")[0] for test in reach}

        def order(test: str) -> tuple[object, ...]:
            near = named in test if test in reach else test.partition("[")[0] in functions
            return test not in reach, not near, self.seconds[test], test

        return sorted(reach | others, key=order)


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
    ours = ("", str(ROOT), f"{ROOT}/runtime/src")
    sys.path[:] = [str(tree), f"{tree}/runtime/src", *(p for p in sys.path if p not in ours)]
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
    """All faults that are not decided, shared out to processes."""
    # What tests import takes longer than most of them; a fork has it already.
    import jax, torch, transformers  # noqa: E401, F401, I001

    tests = default_tests()
    final = ("equivalent", *(() if options.again else ("survived", "undecided")))
    known = {
        row["id"] for row in _last(folder) if row["verdict"] in final or _caught_by(row) in tests
    }
    reached = Map(folder, tests)
    faults = [fault for fault in reached.faults if fault["id"] not in known]
    workers = []
    for i in range(options.workers):
        if not (pid := os.fork()):
            code = 1
            try:
                _work(folder, reached, faults[i :: options.workers], options)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        workers.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in workers]
    assert not any(codes), "a process failed: see above"


def _caught_by(row: dict) -> str:
    """The test that caught a fault: pytest says "FAILED test - why"."""
    return row.get("by", "").partition(" ")[2].partition(" - ")[0]


def _work(folder: Path, reached: Map, faults: list[dict], options: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * options.minutes
    with copied() as tree:
        cheapest = sorted(reached.seconds, key=reached.seconds.__getitem__)[:20]
        said = run_tests(tree, cheapest, 300)
        assert said == "passed", f"without a fault: {said}"
        for fault in faults:
            if time.monotonic() > end:
                return
            row = fault | _judged(tree, fault, reached, options.seconds)
            print(json.dumps(row), flush=True)
            with (folder / "results.jsonl").open("a") as out:
                out.write(json.dumps(row) + "\n")


def _judged(tree: Path, fault: dict, reached: Map, most: float) -> dict:
    source = (ROOT / fault["file"]).read_bytes()
    if hashlib.sha256(source).hexdigest() != fault["digest"]:
        return {"verdict": "stale"}
    if (fault["file"], fault["before"], fault["after"]) in equivalents():
        return {"verdict": "equivalent"}
    change = Change(*(fault[name] for name in ("line", "start", "end", "new", "kind")))
    (tree / fault["file"]).write_bytes(change.applied(source))
    try:
        return verdict(tree, reached.tests(fault), reached.seconds, most)
    finally:
        (tree / fault["file"]).write_bytes(source)


# ---- results ------------------------------------------------------------------------------------
def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _last(folder: Path) -> list[dict]:
    """The last result of each fault."""
    return list({row["id"]: row for row in _read(folder / "results.jsonl")}.values())


def show(folder: Path) -> None:
    rows = _last(folder)
    for row in rows:
        if row["verdict"] not in ("caught", "equivalent"):
            print(f"{row['file']}:{row['line']} ({row['kind']}, {row['verdict']})")
            print(f"  - {row['before']}\n  + {row['after']}")
    print(dict(Counter(row["verdict"] for row in rows)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("map", "run", "show"))
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", default="", help="draw from files whose path begins with this")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=90, help="of tests for one fault, at most")
    parser.add_argument("--minutes", type=float, default=600, help="then begin no other fault")
    parser.add_argument("--again", action="store_true", help="what was not caught, too")
    options, rest = parser.parse_known_args()
    if options.what == "map":
        return make_map(options.folder, options, rest)
    if options.what == "run":
        run(options.folder, options)
    show(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
