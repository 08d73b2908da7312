"""Paths in the folder of a run: records such as metrics.jsonl, and checkpoints.

This is the only file that knows. It is in the lowest room, since below the loop a saved run's
configuration and tokenizer are read. `checkpoints.step_folders` names the folders of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

CONFIG = "config.yml"
"""File name of the configuration, in the run folder and in each checkpoint."""


@dataclass(frozen=True)
class RunFolder:
    """Paths in the folder of a run: records such as metrics and, with --save, checkpoints.

    The folder may not exist yet.
    """

    path: Path

    @classmethod
    def from_options(
        cls, folder: str | None, checkpoint_folder: str | None, preset: str
    ) -> RunFolder:
        """Run folder that a script's option names, else that of --save, else a new one in runs/."""
        if folder or checkpoint_folder:
            return cls(Path(folder or checkpoint_folder or ""))
        return cls(Path("runs") / f"{Path(preset).stem}-{datetime.now():%Y%m%d-%H%M%S}")

    @classmethod
    def from_step_folder(cls, step: Path) -> RunFolder:
        """Run folder that contains the folder of a saved step, directly or in best/."""
        folder = cls(step.absolute().parent)
        parent = cls(folder.path.parent)
        return parent if folder.path == parent.best_folder else folder

    @property
    def config_file(self) -> Path:
        """File of the run's configuration, which `--config` can read."""
        return self.path / CONFIG

    @property
    def run_json(self) -> Path:
        """File with the command, hardware and versions of each start or resume of the run."""
        return self.path / "run.json"

    @property
    def metrics_file(self) -> Path:
        """File of metrics, JSON Lines: one line for each optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def resume_files(self) -> tuple[Path, ...]:
        """Files, besides checkpoints, that a run needs to resume on another machine."""
        return self.config_file, self.run_json, self.metrics_file

    @property
    def record_files(self) -> list[Path]:
        """Existing files besides checkpoints: config, sessions, metrics and tokenizer files."""
        tokenizer_files = self.tokenizer_folder.iterdir() if self.tokenizer_folder.is_dir() else ()
        return [path for path in (*self.resume_files, *tokenizer_files) if path.is_file()]

    @property
    def mirror_file(self) -> Path:
        """File with the ids by which the run and this folder are known at the run's mirror."""
        return self.path / "mirror.json"

    @property
    def loss_curve_file(self) -> Path:
        """Image file with a plot of loss and learning rate by step."""
        return self.path / "loss_curve.png"

    @property
    def tensorboard_folder(self) -> Path:
        """Folder of TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def profile_folder(self) -> Path:
        """Folder of a profiler trace (`--profile`)."""
        return self.path / "profile"

    @property
    def phase_table_file(self) -> Path:
        """File with a table of time by phase of the model, next to the profiler trace."""
        return self.profile_folder / "phases.txt"

    @property
    def eval_json(self) -> Path:
        """File with the metrics and predictions that the validation script writes."""
        return self.path / "eval.json"

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the run's tokenizer."""
        return self.path / "tokenizer"

    @property
    def tokenized_data_folder(self) -> Path:
        """Folder of cached tokens; subfolders are named by a hash of the data and settings."""
        return self.path / "prepared"

    @property
    def reference_folder(self) -> Path:
        """Folder of cached log-probabilities of the reference model; files are named by a hash."""
        return self.path / "reference"

    @property
    def teacher_folder(self) -> Path:
        """Folder of the stored outputs of a teacher; files are named by a hash."""
        return self.path / "teacher"

    @property
    def quantized_weights_folder(self) -> Path:
        """Folder of cached quantized weights; files are named by a hash of the original weights."""
        return self.path / "packed"

    @property
    def base_folder(self) -> Path:
        """Folder of copies of base models: checkpoints of other runs, each named by a hash."""
        return self.path / "base"

    @property
    def best_folder(self) -> Path:
        """Folder of the checkpoint with the best evaluation result."""
        return self.path / "best"
