"""Memory limits of cgroups, as schedulers and containers set them."""

from __future__ import annotations

import pytest

from popxl._devices import host_memory


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A function that makes groups: their folders, each with limit, used and cached bytes."""
    monkeypatch.setattr(host_memory, "_MOUNT", tmp_path)
    monkeypatch.setattr(host_memory, "_PROC_CGROUP", tmp_path / "own")

    def make(own: str, **made: tuple[object, int, int]) -> int | None:
        (tmp_path / "own").write_text(own)
        names = host_memory._V1 if "memory:" in own else host_memory._V2
        for folder, (limit, used, cached) in made.items():
            group = tmp_path / folder.replace("__", "/").strip("_")
            group.mkdir(parents=True, exist_ok=True)
            (group / names[0]).write_text(f"{limit}\n")
            (group / names[1]).write_text(f"{used}\n")
            (group / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\n")
        return host_memory.cgroup_free_bytes()

    return make


def test_the_group_at_the_root_of_a_container(groups):
    assert groups("0::/\n", _=(1000, 300, 50)) == 750
    assert groups("0::/\n", _=("max", 300, 50)) is None


def test_the_least_of_nested_groups(groups):
    """`srun --mem` and systemd's slices set limits at any depth."""
    own = "0::/slurm/job_7/step_0\n"
    assert groups(own, slurm=("max", 900, 0), slurm__job_7=(1000, 300, 50)) == 750
    assert groups(own, slurm__job_7__step_0=(500, 200, 0)) == 300


def test_version_1(groups):
    own = "9:pids:/\n4:cpu,memory:/slurm/job_7\n0::/\n"
    assert groups(own, memory=(2**63 - 4096, 900, 0), memory__slurm__job_7=(1000, 400, 0)) == 600


def test_the_path_of_the_host_in_a_container(groups):
    assert groups("4:memory:/docker/4f5e\n", memory=(1000, 400, 0)) == 600
    assert groups("0::/../../other\n", _=(1000, 400, 0)) == 600


def test_none(groups):
    assert groups("") is None
