"""Read and write run.json: command, hardware and versions of each start of a run."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from files.atomic_writing import write_text_atomically
from files.errors import FileError
from files.json_files import read_json_object
from files.run_folder import RunFolder

VERSIONED = ("popxl-xla", "jax", "jaxlib", "numpy", "transformers")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    installed = {name: _installed_version(name) for name in VERSIONED}
    of_popxl = dict.fromkeys(("popxl", "popxl_addons"), installed["popxl-xla"])
    return {"python": platform.python_version(), **of_popxl, **installed}


def _installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # such as popxl-xla when the Poplar SDK is used instead
        return "not installed"


@dataclass(frozen=True)
class RunSession:
    """One start of a run (a run can be resumed several times): command, hardware and versions.

    Attributes:
        first_step: number of steps done before.
        command: the command as typed; "": none.
        hardware: description of the devices.
        versions: see `installed_versions`.
    """

    first_step: int
    command: str
    hardware: str
    versions: Mapping[str, str] = field(default_factory=installed_versions)


def append_session(folder: RunFolder, session: RunSession) -> None:
    """Append a start of a run to run.json; drops earlier starts whose steps are repeated.

    Raises:
        WriteError: the file cannot be written.
    """
    before = [s for s in read_sessions(folder) if s.first_step < session.first_step]
    data = {"sessions": [asdict(s) for s in (*before, session)]}
    write_text_atomically(
        "the record of the run", folder.run_json, json.dumps(data, indent=2) + "\n"
    )


def read_sessions(folder: RunFolder) -> list[RunSession]:
    """Read the starts of a run from its run.json; [] if the file is missing or damaged."""
    try:
        listed = read_json_object(folder.run_json).data.get("sessions")
    except (FileError, OSError):
        return []
    entries: list[Any] = listed if isinstance(listed, list) else []
    return [session for entry in entries if (session := _parse_session(entry)) is not None]


def _parse_session(entry: Any) -> RunSession | None:
    try:
        session = RunSession(**entry)
    except TypeError:
        return None
    texts = (session.command, session.hardware)
    good = isinstance(session.first_step, int) and isinstance(session.versions, dict)
    return session if good and all(isinstance(text, str) for text in texts) else None
