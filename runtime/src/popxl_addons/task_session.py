"""A session with named streams and variables that saves and loads checkpoints."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

import popxl
from popxl import Session, Variable
from popxl.session import h2dStreamBufferMaps
from popxl_addons.array_files import (
    INDEX,
    StoredArray,
    add_to_index,
    check_conversion,
    file_dtype,
    map_file,
    read_index,
    read_object,
    read_packed,
)
from popxl_addons.named_tensors import NamedTensorData, NamedTensors
from popxl_addons.streams import InputStreams, OutputStreams
from popxl_addons.utils import active_wandb_run
from popxl_addons.variable_factory import memmap_path

__all__ = ["TaskSession", "initialise_memmap_dir_from_checkpoint", "write_variables_pb"]

logger = logging.getLogger(__name__)

ReportMissingMethods = Literal["none", "warn", "error"]

_STATE_FILE = "session_info.json"
_MODEL = "model"
_DATALOADER = "dataloader.bin"


class TaskSession(Session):
    """A `popxl.Session` for one task, with named streams and variables and checkpoints.

    Args:
        inputs: streams that `run` is given.
        outputs: streams that `run` returns.
        state: variables to save and load, by name.
        max_checkpoints: how many of the checkpoints that it saves this session keeps.
        args, kwargs: those of `popxl.Session`.

    Attributes:
        inputs, outputs, state: as given, by name.
        session_state: what is saved besides variables, as JSON: `steps`, the number of runs, and
            what `add_session_state_info` adds.
    """

    def __init__(
        self,
        inputs: InputStreams | Iterable[popxl.HostToDeviceStream],
        outputs: OutputStreams | Iterable[popxl.DeviceToHostStream],
        state: NamedTensors,
        max_checkpoints: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.inputs = (
            inputs if isinstance(inputs, InputStreams) else InputStreams.from_streams(inputs)
        )
        self.outputs = (
            outputs if isinstance(outputs, OutputStreams) else OutputStreams.from_streams(outputs)
        )
        self.state = state
        self.max_checkpoints = max_checkpoints
        self.session_state: dict[str, Any] = {"steps": 0}
        self._dataloader: Any = None
        self._saved_checkpoints: list[Path] = []  # checkpoints, oldest first
        super().__init__(*args, **kwargs)

    @property
    def dataloader(self) -> Any:
        """Data loader of the task, stored here so that checkpoints save its position, or None.

        Its position is part of checkpoints: it has `save(filename)` and `resume(filename=...)`.

        Raises:
            ValueError: it is set to an object without these.
        """
        return self._dataloader

    @dataloader.setter
    def dataloader(self, dataloader: Any) -> None:
        for method in ("save", "resume"):
            if dataloader is not None and not callable(getattr(dataloader, method, None)):
                raise ValueError(f"a dataloader needs a method {method!r}: {dataloader!r} has none")
        self._dataloader = dataloader

    def add_session_state_info(self, info: dict[str, Any]) -> None:
        """Add entries to the session state that checkpoints save; values must be JSON data."""
        json.dumps(info)  # fail here, and not after hours of training
        self.session_state.update(info)

    def run(
        self, inputs: h2dStreamBufferMaps | None = None, downcast_inputs: bool = True
    ) -> dict[popxl.DeviceToHostStream, np.ndarray]:
        """Run the program once as `Session.run` and count the run."""
        outputs = super().run(inputs, downcast_inputs)
        self.session_state["steps"] += 1
        return outputs

    # ---- variables by name ----------------------------------------------------------------------
    def get_named_tensors_data(self) -> NamedTensorData:
        """Return the host arrays of all variables of `state` by name; not copies."""
        names, tensors = self.state.unpack()
        data: Mapping[popxl.Tensor, np.ndarray] = self.get_tensors_data(cast(list[Any], tensors))
        return NamedTensorData.pack(names, [data[t] for t in tensors])

    def load_from_session(
        self, src: TaskSession, report_missing: ReportMissingMethods = "none"
    ) -> None:
        """Copy values from another session's variables to those of the same names here.

        Args:
            report_missing: what to do about names that only one of the sessions has: nothing,
                log a warning, or raise ValueError.

        Raises:
            ValueError: a variable cannot hold the numbers of the other, or has another shape.
        """
        data, current = (s.get_named_tensors_data().to_dict() for s in (src, self))
        _report_missing_names(current, data, report_missing, "the source session")
        arrays = {name: data[name] for name in current if name in data}
        self._write_arrays_by_name(arrays, current, "the source session")

    def _write_arrays_by_name(
        self, arrays: Mapping[str, np.ndarray], current: Mapping[str, np.ndarray], source: str
    ) -> None:
        """Write host arrays to the variables of their names; checks all before it writes any."""
        for name, array in arrays.items():
            check_conversion(name, source, array, current[name].dtype)
        variables = self.state.to_dict()
        self.write_variables_data({variables[n]: a for n, a in arrays.items()})  # type: ignore[misc]

    # ---- W&B ------------------------------------------------------------------------------------
    def wandb_histogram(self, name: str, step: int, data: np.ndarray) -> None:
        """Log a histogram of `data` to the active W&B run; does nothing without one."""
        run = active_wandb_run()
        if run is not None:
            import wandb

            values = data[np.isfinite(data)].astype(np.float32)
            run.log({name: wandb.Histogram(values)}, step=step)

    def wandb_variable_histograms(self, step: int = 0) -> None:
        """Log a histogram of each variable of `state`."""
        for name, data in self.get_named_tensors_data().to_dict().items():
            self.wandb_histogram(name, step, np.asarray(data))

    # ---- checkpoints ----------------------------------------------------------------------------
    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save variables, session state and dataloader position to a folder.

        It holds `model/<name>.npz` for each variable, with one array under the key `<name>`;
        variables whose host data are memory maps are copied as the files they are into `model`.
        `model/arrays.json` says what dtype and shape they have.
        `session_info.json` is `session_state`, and `dataloader.bin` what the dataloader saves.

        Other files in the folder stay. Files of the checkpoint are replaced when all new ones are
        written, and `session_info.json` last. Of the checkpoints that this session saved, all but
        the latest `max_checkpoints` are removed.
        """
        target = Path(checkpoint_dir)
        model = target / _MODEL
        model.mkdir(parents=True, exist_ok=True)
        arrays = self.get_named_tensors_data().to_dict()
        entries = _index_entries(arrays)
        drafts: list[Path] = []
        try:
            for name, array in arrays.items():
                draft = _temporary_path(model / entries[name].file)
                if draft not in drafts and _save_array(draft, name, array):
                    drafts.append(draft)
        except BaseException:
            for entry in entries.values():
                _temporary_path(model / entry.file).unlink(missing_ok=True)
            raise
        info = _temporary_path(target / _STATE_FILE)
        info.write_text(json.dumps(self.session_state, indent=2), encoding="utf-8")
        for path in drafts:
            path.rename(path.with_name(path.name.removeprefix(".")))
        add_to_index(model, entries)
        if self._dataloader is not None:
            self._dataloader.save(str(target / _DATALOADER))
        info.rename(target / _STATE_FILE)
        self._remove_old_checkpoints(target)

    def _remove_old_checkpoints(self, newest: Path) -> None:
        self._saved_checkpoints = [p for p in self._saved_checkpoints if p != newest] + [newest]
        while len(self._saved_checkpoints) > max(self.max_checkpoints, 1):
            shutil.rmtree(self._saved_checkpoints.pop(0), ignore_errors=True)

    def load_checkpoint(
        self,
        checkpoint_dir: str,
        report_missing: ReportMissingMethods = "warn",
        skip_memmap: bool = False,
    ) -> None:
        """Load a checkpoint of `save_checkpoint`; set a dataloader before, to have it resumed.

        Args:
            report_missing: what to do about variables and keys of the session state that the
                checkpoint lacks, and about others that it has: nothing, log a warning, or raise
                ValueError before anything is loaded.
            skip_memmap: leave variables alone whose host data is a memory map.

        Raises:
            ValueError: the folder has no `model`, a file is damaged, a variable cannot hold the
                numbers that were saved, or has another shape; or see `report_missing`. Nothing is
                loaded then.
        """
        folder = Path(checkpoint_dir)
        info = _read_info(folder)
        current = self.get_named_tensors_data().to_dict()
        saved = _saved_index_entries(folder / _MODEL, current)
        _report_missing_names(current, saved, report_missing, str(folder))
        _report_missing_names(
            self.session_state, info, report_missing, str(folder), "entries of session state"
        )
        expected_names = [n for n in current if n in saved]
        if skip_memmap:
            expected_names = [n for n in expected_names if not isinstance(current[n], np.memmap)]
        arrays = {n: _load_array(folder / _MODEL, n, saved[n], current[n]) for n in expected_names}
        self._write_arrays_by_name(arrays, current, str(folder))
        self.session_state = info
        if self._dataloader is not None:
            self._resume_dataloader(folder / _DATALOADER, report_missing)

    def _resume_dataloader(self, path: Path, report_missing: ReportMissingMethods) -> None:
        if path.exists():
            self._dataloader.resume(filename=str(path))
        else:
            _warn_or_raise(
                f"{path.parent} has no {path.name}: the dataloader starts anew", report_missing
            )


# ---- files --------------------------------------------------------------------------------------
def _read_info(folder: Path) -> dict[str, Any]:
    """Read the session state of a checkpoint; a new session's state if it has none."""
    if not (folder / _MODEL).is_dir():
        raise ValueError(f"{folder} is no checkpoint: it has no folder {_MODEL}")
    return read_object(folder / _STATE_FILE) or {"steps": 0}


def _file_of(array: Any) -> Path:
    """Return the path of the file that a memory map is on."""
    return Path(str(array.filename))


def _temporary_path(path: Path) -> Path:
    """Temporary path at which a file is written before it replaces another."""
    return path.with_name(f".{path.name}")


def _file_name(name: str, array: np.ndarray) -> str:
    return _file_of(array).name if isinstance(array, np.memmap) else f"{name}.npz"


def _index_entries(arrays: Mapping[str, np.ndarray]) -> dict[str, StoredArray]:
    """Return the index entries under which a checkpoint stores variables.

    Raises:
        ValueError: two memory maps are files of one name in different folders.
    """
    maps: dict[str, Path] = {}
    for name, array in arrays.items():
        if isinstance(array, np.memmap):
            path = _file_of(array).resolve()
            if maps.setdefault(path.name, path) != path:
                raise ValueError(
                    f"{path} of variable {name!r} and {maps[path.name]} would be one file of the "
                    "checkpoint: give memory maps files of different names"
                )
    return {n: StoredArray.from_array(_file_name(n, a), a) for n, a in arrays.items()}


def _save_array(draft: Path, name: str, array: np.ndarray) -> bool:
    """Write an array to a temporary file, unless it is a memory map in the checkpoint folder."""
    if isinstance(array, np.memmap):
        array.flush()
        source = _file_of(array)
        if source.resolve() == draft.with_name(source.name).resolve():
            return False
        shutil.copyfile(source, draft)
    else:
        stored = np.asarray(array, order="C").view(file_dtype(array.dtype))
        with draft.open("wb") as file:
            np.savez(file, **{name: stored})  # type: ignore[arg-type]
    return True


def _saved_index_entries(
    model: Path, current: Mapping[str, np.ndarray]
) -> dict[str, StoredArray | None]:
    """Read the index entry of each variable in a checkpoint; None for files not in the index."""
    index = {n: entry for n, entry in read_index(model).items() if (model / entry.file).exists()}
    maps = {n for n, array in current.items() if isinstance(array, np.memmap)}
    own = {n: _file_name(n, array) for n, array in current.items() if n not in index}
    known = {n: index.get(n) for n in current if n in index or (model / own[n]).exists()}
    files = {*own.values(), *(index[n].file for n in current if n in index)}
    unknown = {n: entry for n, entry in index.items() if entry.file not in files}
    files |= {entry.file for entry in unknown.values()}
    others = {p.stem for p in model.glob("*.npz") if p.name not in files}
    return dict.fromkeys(others - maps) | unknown | known


def _load_array(
    model: Path, name: str, index_entry: StoredArray | None, current: np.ndarray
) -> np.ndarray:
    """Load a checkpoint's array for a variable; its present value `current` gives the default."""
    own = StoredArray.from_array(_file_name(name, current), current)
    if (index_entry or own).file.endswith(".npz"):
        return read_packed(model, name, index_entry or own)
    is_copy = index_entry is None and isinstance(current, np.memmap)  # of the map's own file
    return map_file(
        model, index_entry or own, size=_file_of(current).stat().st_size if is_copy else None
    )


def _report_missing_names(
    expected_names: Iterable[str],
    saved: Iterable[str],
    method: ReportMissingMethods,
    source: str,
    noun: str = "variables",
) -> None:
    """Report missing and unused names: raise, warn or ignore, as `method` says."""
    expected_names, saved = set(expected_names), set(saved)
    if missing := sorted(expected_names - saved):
        _warn_or_raise(
            f"{source} has no data for the {noun} {missing}; they keep their values", method
        )
    if unknown := sorted(saved - expected_names):
        _warn_or_raise(
            f"{source} has data for {unknown}, which are no {noun} of this session", method
        )


def _warn_or_raise(message: str, method: ReportMissingMethods) -> None:
    if method == "error":
        raise ValueError(message)
    if method == "warn":
        logger.warning(message)


def write_variables_pb(session: Session, weights: Mapping[Variable, np.ndarray]) -> None:
    """Write a session's variables in chunks, with a log line after each."""
    items = list(weights.items())
    chunk = max(1, len(items) // 10)
    for i in range(0, len(items), chunk):
        session.write_variables_data(dict(items[i : i + chunk]))
        logger.info("wrote %d of %d variables", min(i + chunk, len(items)), len(items))


def initialise_memmap_dir_from_checkpoint(
    checkpoint_dir: str | Path, memmap_dir: str | Path
) -> None:
    """Copy a checkpoint's variables to a folder that `init` reads as `memmap_dir`."""
    model = Path(checkpoint_dir) / _MODEL
    _read_info(model.parent)
    index = {entry.file: entry for entry in read_index(model).values()}
    copied: dict[str, StoredArray] = {}
    for path in sorted(model.iterdir()):
        if path.name == INDEX:
            continue
        packed = path.suffix == ".npz"
        target = memmap_path(memmap_dir, path.stem) if packed else Path(memmap_dir) / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if packed:
            with np.load(path, allow_pickle=False) as arrays:
                arrays[path.stem].tofile(target)
        else:
            shutil.copyfile(path, target)
        if path.name in index:
            copied[target.stem] = index[path.name]._replace(file=target.name)
    if copied:
        add_to_index(Path(memmap_dir), copied)
