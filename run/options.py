"""Options of a training run besides its configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunOptions:
    """Options of the command line.

    Attributes:
        name: of the configuration, for people.
        run_dir: where records go; None: to the checkpoints, else a new directory.
        fresh: delete the run in `checkpoint.save` and start over.
        save_hf: folder for a model in Hugging Face's form, at the end.
        wandb, wandb_name: log to Weights & Biases, and under which name.
        tensorboard: write events for TensorBoard into the run directory.
        command: the whole command as typed; "": the run was not started by one.
        preview: samples to print before anything is compiled.
        profile: steps for each measurement of `--profile`; None: do not measure.
    """

    name: str
    run_dir: str | None = None
    fresh: bool = False
    save_hf: str | None = None
    wandb: bool = False
    wandb_name: str | None = None
    tensorboard: bool = False
    profile: int | None = None
    command: str = ""
    preview: int = 0
