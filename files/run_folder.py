"""The layout of a run's folder: what lies where in it, and is called what.

This is the only file that knows. It is in the lowest room, since below the loop a saved run's
configuration and tokenizer are read. `checkpoints.step_folders` names the folders of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

CONFIG = "config.yml"
"""The configuration, in the folder and in each step that is saved."""


@dataclass(frozen=True)
class RunFolder:
    """Records of a run and, where --save names the folder, its steps. It need not be there."""

    path: Path

    @classmethod
    def from_options(cls, given: str | None, save: str | None, preset: str) -> RunFolder:
        """The one given, else where checkpoints go, else a new one under runs/."""
        if given or save:
            return cls(Path(given or save or ""))
        return cls(Path("runs") / f"{Path(preset).stem}-{datetime.now():%Y%m%d-%H%M%S}")

    @classmethod
    def from_step_folder(cls, step: Path) -> RunFolder:
        """The run that has the folder of a step, in itself or in best/."""
        folder = cls(step.absolute().parent)
        outer = cls(folder.path.parent)
        return outer if folder.path == outer.best else folder

    @property
    def config(self) -> Path:
        """The configuration, which `--config` reads back."""
        return self.path / CONFIG

    @property
    def sessions(self) -> Path:
        """Each time that the run was started or continued."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """A row for each optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def single_records(self) -> tuple[Path, ...]:
        """The files that a run on another machine goes on with."""
        return self.config, self.sessions, self.metrics

    @property
    def records(self) -> list[Path]:
        """Those that are there, and the tokenizer's."""
        kept = self.tokenizer.iterdir() if self.tokenizer.is_dir() else ()
        return [path for path in (*self.single_records, *kept) if path.is_file()]

    @property
    def mirror(self) -> Path:
        """The names by which a mirror knows the run and this folder."""
        return self.path / "mirror.json"

    @property
    def loss_curve(self) -> Path:
        """The picture of them."""
        return self.path / "loss_curve.png"

    @property
    def tensorboard(self) -> Path:
        """The metrics as events, if TensorBoard is asked for."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """The folder of a trace, if one is asked for."""
        return self.path / "profile"

    @property
    def phases(self) -> Path:
        """The table of time by phase that belongs to the trace."""
        return self.profile / "phases.txt"

    @property
    def validation(self) -> Path:
        """What run_validation.py found."""
        return self.path / "eval.json"

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer that the run was made with."""
        return self.path / "tokenizer"

    @property
    def prepared(self) -> Path:
        """The folder of large data as tokens, by a digest of what they follow from."""
        return self.path / "prepared"

    @property
    def reference(self) -> Path:
        """The folder of what the reference of preferences says, by a digest of what it follows
        from."""
        return self.path / "reference"

    @property
    def packed(self) -> Path:
        """The folder of frozen weights in few bits, by a digest of what they were."""
        return self.path / "packed"

    @property
    def base(self) -> Path:
        """The folder of steps of other runs whose weights this one does not train, by a digest."""
        return self.path / "base"

    @property
    def best(self) -> Path:
        """The folder of the step with the best weights."""
        return self.path / "best"
