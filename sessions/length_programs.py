"""The programs of one session, one for each length to which encoder samples are padded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

import popdist
import popxl
from config.length_buckets import bucket_configs
from config.sections import RunConfig
from data.samples import Batch, longest_sample


class _Program(Protocol):
    @property
    def ir(self) -> popxl.Ir: ...

    @property
    def inputs(self) -> Mapping[str, popxl.HostToDeviceStream]: ...


ProgramT = TypeVar("ProgramT", bound=_Program)


class LengthProgram(NamedTuple, Generic[ProgramT]):
    """A compiled program for encoder samples of one padded length, and the function that runs it.

    Attributes:
        length: tokens of an encoder sample.
        program: the program for samples of that length.
        run: runs it, as `popxl.Session.run` does.
    """

    length: int
    program: ProgramT
    run: Callable[[Any], dict[popxl.DeviceToHostStream, np.ndarray]]

    def crop(self, samples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Drops padding columns beyond the program's length from arrays (n, length)."""
        streams = self.program.inputs
        return {
            name: x if x.ndim < 2 else x[:, : streams[name].shape[1]]
            for name, x in samples.items()
            if name in streams
        }


class LengthPrograms(Generic[ProgramT]):
    """Programs of one session for encoder samples of different lengths (`data.length_buckets`)."""

    def __init__(
        self,
        config: RunConfig,
        session: popxl.Session,
        program: ProgramT,
        build: Callable[[RunConfig], ProgramT],
    ) -> None:
        """Build and compile the programs of shorter lengths.

        Args:
            program: the session's own, of `model.sequence_length`.
            build: builds the same program of a configuration with another length.
        """
        self._programs = list[LengthProgram[ProgramT]]()
        for shorter in bucket_configs(config):
            added = build(shorter)
            run = session.add_program(added.ir)
            self._programs.append(LengthProgram(shorter.model.sequence_length, added, run))
        self._programs.append(LengthProgram(config.model.sequence_length, program, session.run))

    def __len__(self) -> int:
        return len(self._programs)

    def for_batches(self, batches: Iterable[Batch]) -> LengthProgram[ProgramT]:
        """Returns the program with the least padding for the batches of all processes."""
        if len(self) == 1:
            return self._programs[0]
        longest = max(map(longest_sample, batches))
        longest = max(popdist.all_gather_object(longest))
        return next(p for p in self._programs if p.length >= longest)
