"""Environment variables that popxl, JAX and XLA read before errors can be reported.

XLA ends the process at a flag that it does not know, and JAX raises when it is imported. So values
that are not known to be good are tried in another process first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

from config.errors import ConfigError
from config.values import NonNegativeFloat, ValueType
from files.formatting import format_name, format_value

_XLA = "from jaxlib import xla_client; xla_client.CompileOptions()"
_JAX = "import jax"
_SECONDS = 60
_FLAGS = re.compile(
    r"(\s*--xla_(force_host_platform_device_count=\d{1,4}|backend_optimization_level=[0-3]"
    r"|cpu_use_fusion_emitters=(true|false)|cpu_parallel_codegen_split_count=\d{1,4}"  # tests
    r"|cpu_collective_call_terminate_timeout_seconds=\d{1,4}))*\s*"  # which popxl adds
)
_SWITCH = re.compile(r"JAX_(DISABLE_MOST_OPTIMIZATIONS|ENABLE_X64)=([01]|[Tt]rue|[Ff]alse)")
_LOGGED = re.compile(r"[EF]\d{4} .*?\] (.*)")
_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")
_CHECK = "POPXL_CHECK"
_CACHE_FOLDERS = ("POPXL_CACHE_DIR", "POPART_CACHE_DIR")
_PLUGINS = "jax_plugins"
_GOOD = {"JAX_COMPILATION_CACHE_DIR", "JAX_COORDINATOR_ADDRESS", "JAX_LOCAL_DEVICE_IDS"}


def check_environment() -> None:
    """Checks the environment variables that popxl, JAX and XLA read.

    Raises:
        ConfigError: one has a value with which they do not start.
    """
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; matplotlib raises at unknown names
    _check_gigabytes_variable("POPXL_CACHE_GB")
    if os.environ.get(_CHECK, "0") not in ("", "0", "nan", "inf"):
        raise ConfigError(
            f"the environment variable {_CHECK} is {format_value(os.environ[_CHECK])}, but must "
            "be nan or inf: correct or unset it"
        )
    _check_platforms(os.environ.get("JAX_PLATFORMS", ""))
    flags = os.environ.get("XLA_FLAGS", "")
    if not _FLAGS.fullmatch(flags):
        _check_program_starts("XLA_FLAGS", flags, _XLA)
    names = [
        name
        for name, value in os.environ.items()
        if name.startswith("JAX_")
        and name not in {*_GOOD, "JAX_PLATFORMS"}
        and not _SWITCH.fullmatch(f"{name}={value}")
    ]
    if names and _explain_start_failure(_JAX, os.environ) is not None:
        rest = {name: value for name, value in os.environ.items() if name not in names}
        for name in names:
            _check_program_starts(name, os.environ[name], _JAX, rest)


def _check_gigabytes_variable(name: str) -> None:
    setting = os.environ.get(name)
    if setting:
        try:
            ValueType.from_annotation(NonNegativeFloat).parse(
                setting, f"the environment variable {name}"
            )
        except ValueError as error:
            raise ConfigError(f"{error}: correct or unset it") from None


def _check_platforms(setting: str) -> None:
    known = {*_PLATFORMS, *(plugin.name for plugin in entry_points(group=_PLUGINS))}
    for name in setting.split(","):
        if name.strip() and name.strip() not in known:
            raise ConfigError(
                f"the environment variable JAX_PLATFORMS names {format_value(name.strip())}, but "
                f"the platforms are {', '.join(_PLATFORMS)}: set it to one of them, or unset it"
            )


def _check_program_starts(
    name: str, value: str, program: str, environment: Mapping[str, str] | None = None
) -> None:
    """Raises ConfigError unless a program starts with the environment variable as it is set."""
    reason = _explain_start_failure(
        program, {**(os.environ if environment is None else environment), name: value}
    )
    if reason is not None:
        raise ConfigError(
            f"the environment variable {format_name(name, 40)} is {format_value(value)}, with "
            f"which {'XLA' if program == _XLA else 'JAX'} does not start ({reason}): correct or "
            "unset it"
        )


def _explain_start_failure(program: str, environment: Mapping[str, str]) -> str | None:
    """Returns why a program does not start with these environment variables; None if it does."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], env=dict(environment), timeout=_SECONDS,
            capture_output=True, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it takes more than {_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it gives no reason"]
    # XLA gives its reason first, and then lists all its flags; Python's is the last line.
    logged = [match[1] for line in lines if (match := _LOGGED.match(line))]
    return format_name((logged or lines[-1:])[0].strip(), 80)


def use_default_cache() -> None:
    """Set POPXL_CACHE_DIR to a folder in the user's cache, unless a cache is configured.

    The folder is `$XDG_CACHE_HOME/popxl/executables`, else `~/.cache/popxl/executables`. An empty
    variable disables the cache.

    The folder is made with mode 0700, since its files are run. Where it cannot be made there is no
    cache: it only saves time.
    """
    if any(name in os.environ for name in _CACHE_FOLDERS):
        return
    with suppress(OSError, RuntimeError, ValueError):  # no home; a name that no path can have
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (given if given.is_absolute() else Path.home() / ".cache") / "popxl/executables"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            os.environ[_CACHE_FOLDERS[0]] = str(folder)
