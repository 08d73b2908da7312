"""A session that knows the names of its streams and variables, and saves and loads them."""

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
from popxl_addons.named_tensors import NamedTensorData, NamedTensors
from popxl_addons.streams import InputStreams, OutputStreams
from popxl_addons.utils import active_wandb_run
from popxl_addons.variable_factory import file_dtype, memmap_path

__all__ = ["TaskSession", "initialise_memmap_dir_from_checkpoint", "write_variables_pb"]

logger = logging.getLogger(__name__)

ReportMissingMethods = Literal["none", "warn", "error"]

_STATE_FILE = "session_info.json"
_MODEL = "model"
_DATALOADER = "dataloader.bin"


class TaskSession(Session):
    """A session of one task, such as training or generation.

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
        self._saved: list[Path] = []  # checkpoints, oldest first
        super().__init__(*args, **kwargs)

    @property
    def dataloader(self) -> Any:
        """The loader of the task's data, kept here for the program, or None.

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
        """Add entries to what is saved with checkpoints. Values must be JSON data."""
        json.dumps(info)  # fail here, and not after hours of training
        self.session_state.update(info)

    def run(
        self, inputs: h2dStreamBufferMaps | None = None, downcast_inputs: bool = True
    ) -> dict[popxl.DeviceToHostStream, np.ndarray]:
        """Like `Session.run`; counts the run."""
        outputs = super().run(inputs, downcast_inputs)
        self.session_state["steps"] += 1
        return outputs

    # ---- variables by name ----------------------------------------------------------------------
    def get_named_tensors_data(self) -> NamedTensorData:
        """Host data of all variables of `state`, by name. Live arrays, not copies."""
        names, tensors = self.state.unpack()
        data: Mapping[popxl.Tensor, np.ndarray] = self.get_tensors_data(cast(list[Any], tensors))
        return NamedTensorData.pack(names, [data[t] for t in tensors])

    def load_from_session(
        self, src: TaskSession, report_missing: ReportMissingMethods = "none"
    ) -> None:
        """Copy the variables that have the same name in another session.

        Args:
            report_missing: what to do about names that only one of the sessions has: nothing,
                log a warning, or raise ValueError.
        """
        data, names = src.get_named_tensors_data().to_dict(), self.state.to_dict()
        _report(names, data, report_missing, "the source session")
        weights = {t: data[name] for name, t in names.items() if name in data}
        self.write_variables_data(weights)  # type: ignore[arg-type]

    # ---- W&B ------------------------------------------------------------------------------------
    def wandb_histogram(self, name: str, step: int, data: np.ndarray) -> None:
        """Log a histogram of `data` to the active W&B run, if there is one."""
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
        """Save variables, session state and the dataloader's position in a folder.

        It holds `model/<name>.npz` for each variable, with one array under the key `<name>`;
        variables whose host data are memory maps are copied as the files they are into `model`.
        `session_info.json` is `session_state`, and `dataloader.bin` what the dataloader saves.

        Other files in the folder stay. Files of the checkpoint are replaced when all new ones are
        written, and `session_info.json` last. Of the checkpoints that this session saved, all but
        the latest `max_checkpoints` are removed.
        """
        target = Path(checkpoint_dir)
        (target / _MODEL).mkdir(parents=True, exist_ok=True)
        arrays = self.get_named_tensors_data().to_dict()
        try:
            written = [_save_array(target / _MODEL, name, array) for name, array in arrays.items()]
        except BaseException:
            for name in arrays:
                (target / _MODEL / f".{name}.npz").unlink(missing_ok=True)
            raise
        info = target / f".{_STATE_FILE}"
        info.write_text(json.dumps(self.session_state, indent=2), encoding="utf-8")
        for path in filter(None, written):
            path.rename(path.with_name(path.name.removeprefix(".")))
        if self._dataloader is not None:
            self._dataloader.save(str(target / _DATALOADER))
        info.rename(target / _STATE_FILE)
        self._remove_old(target)

    def _remove_old(self, newest: Path) -> None:
        self._saved = [p for p in self._saved if p != newest] + [newest]
        while len(self._saved) > max(self.max_checkpoints, 1):
            shutil.rmtree(self._saved.pop(0), ignore_errors=True)

    def load_checkpoint(
        self,
        checkpoint_dir: str,
        report_missing: ReportMissingMethods = "warn",
        skip_memmap: bool = False,
    ) -> None:
        """Load what `save_checkpoint` saved. A dataloader must be set before, to be resumed.

        Args:
            report_missing: what to do about variables and keys of the session state that the
                checkpoint lacks, and about others that it has: nothing, log a warning, or raise
                ValueError before anything is loaded.
            skip_memmap: leave variables alone whose host data is a memory map.

        Raises:
            ValueError: the folder has no `model`, or see `report_missing`.
        """
        folder = Path(checkpoint_dir)
        info = _read_info(folder)
        current = self.get_named_tensors_data().to_dict()
        maps = {n: a for n, a in current.items() if isinstance(a, np.memmap)}
        files = {n: folder / _MODEL / f"{n}.npz" for n in current if n not in maps}
        files |= {n: folder / _MODEL / _file_of(a).name for n, a in maps.items()}
        files |= {p.stem: p for p in (folder / _MODEL).glob("*.npz") if p.stem not in current}
        saved = {n: p for n, p in files.items() if p.exists()}
        _report(current, saved, report_missing, str(folder))
        _report(self.session_state, info, report_missing, str(folder), "entries of session state")
        wanted = [n for n in current if n in saved and not (skip_memmap and n in maps)]
        variables = self.state.to_dict()
        self.write_variables_data(
            {variables[n]: _load_array(saved[n], n, current[n]) for n in wanted}  # type: ignore[misc]
        )
        self.session_state = info
        if self._dataloader is not None:
            self._resume_dataloader(folder / _DATALOADER, report_missing)

    def _resume_dataloader(self, path: Path, report_missing: ReportMissingMethods) -> None:
        if path.exists():
            self._dataloader.resume(filename=str(path))
        else:
            _tell(f"{path.parent} has no {path.name}: the dataloader starts anew", report_missing)


# ---- files --------------------------------------------------------------------------------------
def _read_info(folder: Path) -> dict[str, Any]:
    """The session state of a checkpoint; that of a new session if it has none."""
    if not (folder / _MODEL).is_dir():
        raise ValueError(f"{folder} is no checkpoint: it has no folder {_MODEL}")
    path = folder / _STATE_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"steps": 0}


def _file_of(array: np.memmap) -> Path:
    return Path(str(array.filename))


def _save_array(folder: Path, name: str, array: np.ndarray) -> Path | None:
    """Write an array to a file whose name begins with a dot.

    Returns:
        The path; None for a memory map that lives in the folder.
    """
    if isinstance(array, np.memmap):
        array.flush()
        source = _file_of(array)
        if source.resolve() == (folder / source.name).resolve():
            return None
        shutil.copyfile(source, folder / f".{source.name}")
        return folder / f".{source.name}"
    stored = np.asarray(array, order="C").view(file_dtype(array.dtype))
    path = folder / f".{name}.npz"
    with path.open("wb") as file:
        np.savez(file, **{name: stored})  # type: ignore[arg-type]
    return path


def _load_array(path: Path, name: str, current: np.ndarray) -> np.ndarray:
    """What a file holds for a variable whose data are `current`.

    A memory map's file is a copy of the map's own; an .npz file holds what numpy has no name for
    as integers.
    """
    dtype = current.dtype
    if isinstance(current, np.memmap):
        return np.memmap(path, dtype, "r", int(current.offset), current.shape)
    with np.load(path, allow_pickle=False) as arrays:
        array = arrays[name]
    return array.view(dtype) if array.dtype == file_dtype(dtype) != dtype else np.asarray(array)


def _report(
    wanted: Iterable[str],
    saved: Iterable[str],
    method: ReportMissingMethods,
    source: str,
    what: str = "variables",
) -> None:
    """Tell of names that are wanted and not found, and the other way round."""
    wanted, saved = set(wanted), set(saved)
    if missing := sorted(wanted - saved):
        _tell(f"{source} has no data for the {what} {missing}; they keep their values", method)
    if unknown := sorted(saved - wanted):
        _tell(f"{source} has data for {unknown}, which are no {what} of this session", method)


def _tell(message: str, method: ReportMissingMethods) -> None:
    if method == "error":
        raise ValueError(message)
    if method == "warn":
        logger.warning(message)


def write_variables_pb(session: Session, weights: Mapping[Variable, np.ndarray]) -> None:
    """Write data to variables of a session, a few at a time, with log lines of the progress."""
    items = list(weights.items())
    chunk = max(1, len(items) // 10)
    for i in range(0, len(items), chunk):
        session.write_variables_data(dict(items[i : i + chunk]))
        logger.info("wrote %d of %d variables", min(i + chunk, len(items)), len(items))


def initialise_memmap_dir_from_checkpoint(
    checkpoint_dir: str | Path, memmap_dir: str | Path
) -> None:
    """Copy the variables of a checkpoint to where `memmap_dir` of `init` looks for them."""
    folder = Path(checkpoint_dir)
    _read_info(folder)
    for path in sorted((folder / _MODEL).iterdir()):
        packed = path.suffix == ".npz"
        target = memmap_path(memmap_dir, path.stem) if packed else Path(memmap_dir) / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if packed:
            with np.load(path, allow_pickle=False) as arrays:
                arrays[path.stem].tofile(target)
        else:
            shutil.copyfile(path, target)
