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

_STATE_FILE = "session_state.json"
_VARIABLES = "variables"


class TaskSession(Session):
    """A session of one task, such as training or generation.

    Args:
        inputs: streams that `run` is given.
        outputs: streams that `run` returns.
        state: variables to save and load, by name.
        max_checkpoints: how many checkpoints of a folder `save_checkpoint` keeps.
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
        super().__init__(*args, **kwargs)

    @property
    def dataloader(self) -> Any:
        """The loader of the task's data, kept here for the program. Its position is saved if it
        has `state_dict()` and `load_state_dict(state)`."""
        return self._dataloader

    @dataloader.setter
    def dataloader(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        saved = self.session_state.get("dataloader")
        if saved is not None and hasattr(dataloader, "load_state_dict"):
            dataloader.load_state_dict(saved)

    def add_session_state_info(self, info: dict[str, Any]) -> None:
        """Add entries to what is saved with checkpoints. Values must be JSON data."""
        json.dumps(info)  # fail here, and not after hours of training
        self.session_state.update(info)

    def run(
        self, inputs: h2dStreamBufferMaps | None = None, downcast_inputs: bool = True
    ) -> dict[popxl.DeviceToHostStream, np.ndarray]:
        """As `Session.run`; counts the run."""
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
            report_missing: what to do about variables of this session that `src` lacks.
        """
        self._load(src.get_named_tensors_data().to_dict(), report_missing, "the source session")

    def _load(
        self, data: Mapping[str, np.ndarray], report_missing: ReportMissingMethods, source: str
    ) -> None:
        names = self.state.to_dict()
        _report([name for name in names if name not in data], report_missing, source)
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
        """Save variables and session state in a folder, one .npy file for each variable.

        The folder appears under its name only when it is complete. Of its siblings with the same
        stem (`<stem><number>`), all but the latest `max_checkpoints` are removed.
        """
        target = Path(checkpoint_dir)
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / _VARIABLES).mkdir(parents=True)
        if hasattr(self._dataloader, "state_dict"):
            self.session_state["dataloader"] = self._dataloader.state_dict()
        data = self.get_named_tensors_data().to_dict()
        dtypes = {name: t.dtype.name for name, t in self.state.to_dict().items()}
        for name, array in data.items():
            stored = np.asarray(array, order="C").view(file_dtype(array.dtype))
            np.save(memmap_path(partial / _VARIABLES, name), stored, allow_pickle=False)
        document = {"session_state": self.session_state, "dtypes": dtypes}
        (partial / _STATE_FILE).write_text(json.dumps(document, indent=2), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        self._remove_old(target)

    def _remove_old(self, newest: Path) -> None:
        stem = newest.name.rstrip("0123456789")
        others = [
            p
            for p in newest.parent.glob(f"{stem}*")
            if p != newest and p.name[len(stem) :].isdigit() and (p / _STATE_FILE).exists()
        ]
        others.sort(key=lambda p: int(p.name[len(stem) :]), reverse=True)
        for old in others[max(self.max_checkpoints - 1, 0) :]:
            shutil.rmtree(old)

    def load_checkpoint(
        self,
        checkpoint_dir: str,
        report_missing: ReportMissingMethods = "warn",
        skip_memmap: bool = False,
    ) -> None:
        """Load variables and session state.

        Args:
            report_missing: what to do about variables that the checkpoint lacks.
            skip_memmap: leave variables alone whose host data is a memory map.

        Raises:
            ValueError: the folder is no checkpoint.
            KeyError: a variable is missing, with `report_missing="error"`.
        """
        document = _read_document(Path(checkpoint_dir))
        data = {
            name: _load_array(Path(checkpoint_dir), name, dtype)
            for name, dtype in document["dtypes"].items()
        }
        if skip_memmap:
            current = self.get_named_tensors_data().to_dict()
            for name, array in current.items():
                if isinstance(array, np.memmap):
                    data[name] = array
        self._load(data, report_missing, checkpoint_dir)
        self.session_state = document["session_state"]
        if self._dataloader is not None:
            self.dataloader = self._dataloader  # restores its position


# ---- files --------------------------------------------------------------------------------------
def _read_document(folder: Path) -> dict[str, Any]:
    path = folder / _STATE_FILE
    if not path.exists():
        raise ValueError(f"{folder} is no checkpoint: it has no {_STATE_FILE}")
    return json.loads(path.read_text(encoding="utf-8"))


def _load_array(folder: Path, name: str, dtype: str) -> np.ndarray:
    array = np.load(memmap_path(folder / _VARIABLES, name), mmap_mode="r", allow_pickle=False)
    wanted = popxl.dtype.from_name(dtype).as_numpy()
    return np.asarray(array) if array.dtype == wanted else np.asarray(array).view(wanted)


def _report(missing: list[str], method: ReportMissingMethods, source: str) -> None:
    if not missing or method == "none":
        return
    message = f"{source} has no data for the variables {missing}; they keep their values"
    if method == "error":
        raise KeyError(message)
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
    names = _read_document(folder)["dtypes"]
    for name in names:
        target = memmap_path(memmap_dir, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(memmap_path(folder / _VARIABLES, name), target)
