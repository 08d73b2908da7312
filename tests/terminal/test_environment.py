"""Variables with which JAX or XLA would end the process, or show a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import run_finetuning
from config.errors import ConfigError
from terminal import environment
from terminal.environment import check_environment

ROOT = Path(__file__).parents[2]
BAD = [
    ("XLA_FLAGS", "--xla_no_such_flag=1", "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1"),
    ("XLA_FLAGS", "--xla_backend_optimization_level=abc", "Couldn't interpret value abc"),
    ("XLA_FLAGS", "no_flag", "Could not open file"),
    ("JAX_PLATFORMS", "cpu,foo", "names 'foo', but the platforms are cpu, cuda, gpu, rocm, tpu"),
    ("POPXL_CHECK", "yes", "is 'yes', but must be nan or inf"),
    ("JAX_ENABLE_X64", "maybe", "invalid truth value 'maybe'"),
    ("JAX_NUM_CPU_DEVICES", "abc", 'Invalid value "abc" for JAX flag jax_num_cpu_devices'),
]


@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_a_bad_value_is_one_sentence(name, value, said, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        check_environment()
    assert f"the environment variable {name} " in str(error.value)
    assert said in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_FLAGS", ""),
        (
            "XLA_FLAGS",
            " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        ),
        ("XLA_FLAGS", " --xla_cpu_collective_call_terminate_timeout_seconds=1800"),
        ("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false"),
        ("JAX_DISABLE_MOST_OPTIMIZATIONS", "1"),
        ("JAX_ENABLE_X64", "false"),
        ("JAX_PLATFORMS", "cpu"),
        ("JAX_PLATFORMS", ""),
    ],
)
def test_usual_values_start_no_process(name, value, monkeypatch):
    for other in [n for n in os.environ if n == "XLA_FLAGS" or n.startswith("JAX_")]:
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: pytest.fail("started"))
    check_environment()


def test_other_flags_of_xla_are_taken(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false --xla_dump_to=/nowhere")
    check_environment()


@pytest.mark.parametrize("error", [AssertionError, RuntimeError])
def test_a_platform_that_does_not_start_is_one_sentence(error, monkeypatch, capsys):
    """JAX finds it out when it looks for devices: it asserts, or raises."""

    def devices(backend: str) -> list[object]:
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "rocm")
    monkeypatch.setattr(jax, "local_devices", devices)
    assert run_finetuning.main(["--config", "tiny"]) == 2
    (*_, said) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: preset 'tiny' needs 1 cpu device(s)")
    assert said.endswith("JAX_PLATFORMS is 'rocm': unset it, or set it to cpu")


@pytest.mark.slow  # a start
def test_a_script_says_that_the_platform_does_not_start():
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_finetuning.py"), "--config", "tiny"],
        env=os.environ | {"JAX_PLATFORMS": "rocm", "MPLBACKEND": "unknown"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    (*_, said) = done.stderr.splitlines()
    assert said.startswith("error: preset 'tiny' needs 1 cpu device(s)")
    assert said.endswith("JAX_PLATFORMS is 'rocm': unset it, or set it to cpu")


@pytest.mark.slow  # six starts
@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_scripts_end_with_the_sentence(name, value, said):
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_finetuning.py"), "--config", "tiny"],
        env=os.environ | {name: value}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: the environment variable {name}")


def test_flags_of_the_tests_are_known():
    """Each start of a script would try others in a process of its own."""
    assert environment._FLAGS.fullmatch(os.environ["XLA_FLAGS"])
