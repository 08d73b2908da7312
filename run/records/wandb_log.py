"""Logging to Weights & Biases, which `--wandb` asks for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.errors import UserError
from config.sections import RunConfig
from files.formatting import format_name
from run.records.metrics_jsonl import SAMPLES, Sample
from run.records.run_json import installed_versions
from terminal.wandb_environment import check_wandb


class WandbLog:
    """One Weights & Biases run. `WANDB_MODE=offline` keeps it in the run directory.

    wandb runs a process of its own, which buffers while there is no network. If that process is
    gone (killed, or out of disk), the first call fails and later ones do nothing.
    """

    def __init__(
        self, config: RunConfig, name: str | None, project: str | None, directory: Path
    ) -> None:
        """Start the run.

        Args:
            config: logged with the run, together with the versions of what computes.
            name: the run's name; Weights & Biases makes one up for None.
            project: the run's project; None: that of WANDB_PROJECT, else the family's.
            directory: existing directory for local files.

        Raises:
            UserError: if wandb is not installed, not logged in, or not reached.
        """
        check_wandb()
        import wandb  # on demand: slow to import, and only --wandb needs it

        try:
            self._run: Any = wandb.init(
                project=project or os.environ.get("WANDB_PROJECT") or f"popxl-{config.family}",
                name=name,
                dir=directory,
                config=config.to_dict() | {"versions": installed_versions()},
            )
        except Exception as error:  # bad environment settings raise others than wandb's own
            reason = format_name(" ".join(str(error).split()).rstrip("."), 120)
            raise UserError(
                f"Weights & Biases cannot be used: {reason}; "
                "run `wandb login`, or set WANDB_MODE=offline, or leave out --wandb"
            ) from error

    def log(self, row: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """Log the values of one step, and samples as a table."""
        values: dict[str, Any] = {name: value for name, value in row.items() if name != "step"}
        if samples:
            values[SAMPLES] = _table(samples)
        self._ask(lambda run: run.log(values, step=int(row["step"])))

    def close(self, failed: bool = False) -> None:
        """End the run."""
        self._ask(lambda run: run.finish(exit_code=1 if failed else 0))

    def _ask(self, what: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            what(self._run)
        except Exception:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Leave wandb's process; otherwise Python's exit would wait for it, or show a traceback."""
        import wandb

        self._run = None
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each further write
        with suppress(Exception):
            wandb.teardown(exit_code=1)


def _table(samples: Sequence[Sample]) -> Any:
    import wandb

    names = list(samples[0])
    return wandb.Table(columns=names, data=[[sample[name] for name in names] for sample in samples])
