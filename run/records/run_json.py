"""run.json: each time that a run was started or continued, by which command and where."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import popxl_addons
from files.atomic_writing import write_text
from files.errors import FileError
from files.json_files import read_object
from files.run_folder import RunFolder

VERSIONED = ("popxl-xla", "jax", "jaxlib", "numpy", "transformers")


def installed_versions() -> dict[str, str]:
    """Versions of what computes; popxl has that of the package that it comes with."""
    installed = {name: _installed(name) for name in VERSIONED}
    of_popxl = {"popxl": installed["popxl-xla"], "popxl_addons": popxl_addons.__version__}
    return {"python": platform.python_version(), **of_popxl, **installed}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # such as popxl-xla where the Poplar SDK stands in for it
        return "not installed"


@dataclass(frozen=True)
class RunSession:
    """One time that a run was started or continued.

    Attributes:
        first_step: steps that were done before.
        command: as it was typed; "": it was none.
        hardware: the devices.
        versions: see `installed_versions`.
    """

    first_step: int
    command: str
    hardware: str
    versions: Mapping[str, str] = field(default_factory=installed_versions)


def append_session(folder: RunFolder, session: RunSession) -> None:
    """Note a session in a run's folder; those of steps that it does again are dropped.

    Raises:
        WriteError: the file cannot be written.
    """
    before = [s for s in read_sessions(folder) if s.first_step < session.first_step]
    data = {"sessions": [asdict(s) for s in (*before, session)]}
    write_text("the record of the run", folder.sessions, json.dumps(data, indent=2) + "\n")


def read_sessions(folder: RunFolder) -> list[RunSession]:
    """The sessions of a run; none where the file is missing or damaged, as no run needs it."""
    try:
        listed = read_object(folder.sessions).data.get("sessions")
    except (FileError, OSError):
        return []
    entries: list[Any] = listed if isinstance(listed, list) else []
    return [session for entry in entries if (session := _session(entry)) is not None]


def _session(entry: Any) -> RunSession | None:
    try:
        session = RunSession(**entry)
    except TypeError:
        return None
    texts = (session.command, session.hardware)
    good = isinstance(session.first_step, int) and isinstance(session.versions, dict)
    return session if good and all(isinstance(text, str) for text in texts) else None
