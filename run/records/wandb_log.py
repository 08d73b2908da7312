"""Weights & Biases logger (`--wandb`)."""

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
from run.records.metrics_jsonl import SAMPLES, PredictionSample
from run.records.run_json import installed_versions
from terminal.wandb_environment import check_wandb


class WandbLog:
    """Logger to Weights & Biases; `WANDB_MODE=offline` writes to the run's folder.

    wandb has a process of its own, which buffers without a network. If that process dies (killed,
    or out of disk), the first call fails and later ones do nothing.
    """

    def __init__(
        self, config: RunConfig, name: str | None, project: str | None, directory: Path
    ) -> None:
        """Start the W&B run.

        Args:
            config: logged with the run, together with package versions.
            name: name of the W&B run; None: chosen by W&B.
            project: project; None: WANDB_PROJECT, else a name with the model family.
            directory: existing folder for local files.

        Raises:
            UserError: wandb is not installed, not logged in, or cannot be reached.
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
        except Exception as error:  # invalid environment variables raise other types than wandb's
            reason = format_name(" ".join(str(error).split()).rstrip("."), 120)
            raise UserError(
                f"Weights & Biases cannot be used: {reason}; "
                "run `wandb login`, or set WANDB_MODE=offline, or leave out --wandb"
            ) from error

    def log(self, metrics: Mapping[str, float], samples: Sequence[PredictionSample] = ()) -> None:
        """Log the metrics of an optimizer step, and predictions as a table."""
        values: dict[str, Any] = {name: value for name, value in metrics.items() if name != "step"}
        if samples:
            values[SAMPLES] = _prediction_table(samples)
        self._call_wandb(lambda run: run.log(values, step=int(metrics["step"])))

    def close(self, failed: bool = False) -> None:
        """Finish the W&B run."""
        self._call_wandb(lambda run: run.finish(exit_code=1 if failed else 0))

    def _call_wandb(self, action: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception:
            self._tear_down()
            raise

    def _tear_down(self) -> None:
        """Stop wandb's service process, so that Python's exit does not wait for it."""
        import wandb

        self._run = None
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns about each further write
        with suppress(Exception):
            wandb.teardown(exit_code=1)


def _prediction_table(samples: Sequence[PredictionSample]) -> Any:
    import wandb

    names = list(samples[0])
    return wandb.Table(columns=names, data=[[sample[name] for name in names] for sample in samples])
