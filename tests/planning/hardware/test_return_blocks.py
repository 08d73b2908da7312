"""What the heap holds of freed memory, measured in processes that are forked for it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from sessions import session
from tests.modelling.gptj.hf import small_config
from tests.modelling.sessions import fine_tuning

PROGRAM = """
import os
import numpy as np
from planning.hardware.memory_check import release_freed_memory

def resident():
    line = next(x for x in open("/proc/self/status") if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

for mended in (True, False):
    if os.fork():
        os.wait()
        continue
    if mended:
        release_freed_memory()
    np.ones(2**21)  # freeing a large block makes glibc take smaller ones from its heap
    before = resident()
    blocks = [np.ones(2**18) for _ in range(100)]
    del blocks[::2]
    print(round((resident() - before) / 2**21), flush=True)  # of 50 blocks of 2 MiB that are left
    os._exit(0)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other heaps are built differently")
def test_free_blocks_between_others_go_back():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    mended, as_it_was = map(int, done.stdout.split())
    assert mended == pytest.approx(50, abs=2)
    assert as_it_was > 80, "else there is nothing to mend"


@pytest.mark.parametrize("limit", [4.0, None])
def test_runs_with_a_limit_let_blocks_go_back(monkeypatch, tmp_path, limit):
    called = []
    monkeypatch.setattr(session, "release_freed_memory", lambda: called.append("blocks"))
    monkeypatch.setattr(session, "_fit_memory", lambda *_: called.append("place") or 1 / 0)
    config = small_config(layers=1)
    config = config.with_values({"execution.host_memory": limit, "execution.disk": str(tmp_path)})
    with pytest.raises(ZeroDivisionError):  # before anything is compiled
        fine_tuning(config)
    assert called == (["blocks"] if limit else []) + ["place"]
