"""Added program: a further program that runs on another one's variables and remote buffers.

The programs are of equal structure, such as steps for batches of different lengths. Their buffers
correspond in the order of creation: where entries are alike, the programs share them; all others,
such as activations, are a program's own and hold nothing between runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from popxl._run import device_variables
from popxl._run.program import Program, ProgramState
from popxl._run.stream_data import HostStreams
from popxl._storage.buffer_storage import BufferStorage
from popxl.ir import Ir
from popxl.remote_buffer import RemoteBuffer
from popxl.tensor import Shard, Variable


@dataclass
class AddedProgram:
    """Maps the state (variables, buffers) of a session's program to an added one, and changes back.

    Attributes:
        ir: of the added program; its buffers are placed as those of `owner` that correspond.
        owner: of the session's program.
        program, streams: as compiled.
    """

    ir: Ir
    owner: Ir
    program: Program = field(init=False)
    streams: HostStreams = field(init=False)

    def __post_init__(self) -> None:
        """Pairs variables and buffers.

        Raises:
            ValueError: the programs' variables or numbers of buffers differ.
        """
        own, others = self.ir.remote_buffers, self.owner.remote_buffers
        variables, owned = self.ir.main_graph.variables, self.owner.main_graph.variables
        if len(own) != len(others) or len(variables) != len(owned):
            raise ValueError(
                f"the added program has {len(variables)} variables and {len(own)} remote buffers, "
                f"but the session's {len(owned)} and {len(others)}: they must be equal"
            )
        self._shared = {a: b for a, b in zip(own, others, strict=True) if _has_same_spec(a, b)}
        self.ir.place_like(self.owner)
        self._owner_of = dict(zip(variables, owned, strict=True))
        for variable, owner in self._owner_of.items():
            if not self._is_same_variable(variable, owner):
                raise ValueError(f"variable {variable!r} of the added program is not {owner!r}")

    def _is_same_variable(self, a: Variable, b: Variable) -> bool:
        """True if two variables have equal shapes and dtypes, and are in the same place."""
        if (a.shape, a.dtype) != (b.shape, b.dtype) or (a._remote is None) != (b._remote is None):
            return False
        if a._remote is None or b._remote is None:
            return True
        return self._shared.get(a._remote[0]) is b._remote[0] and a._remote[1] == b._remote[1]

    def compile(self, mesh: Mesh, compiled: Mapping[str, Any]) -> None:
        """Compiles the program for the session's devices; arguments as for `Program.compile`."""
        self.program = Program(self.ir, mesh)
        self.streams = HostStreams(self.program)
        self.program.compile(compiled)

    @property
    def unshared_buffers(self) -> set[RemoteBuffer]:
        """Remote buffers of the session's program that the added program does not share."""
        return {*self.owner.remote_buffers} - {*self._shared.values()}

    def owners_of(self, variables: Iterable[Variable]) -> set[Variable]:
        """Returns the session's variables that correspond to variables of the added program."""
        return {self._owner_of[variable] for variable in variables}

    def share_state(self, state: ProgramState) -> ProgramState:
        """Returns the session's device state (variables, buffers) as the added program's.

        Arrays of variables outside buffers move to it, until `return_state`.
        """
        mesh, memory = self.program.mesh, self.program.platform.host_memory
        entries = {}
        for buffer in self.program.buffers:
            owner = self._shared.get(buffer)
            entries[buffer] = (
                BufferStorage(buffer, mesh, memory, state.disk_queue)
                if owner is None or owner not in state.entries
                else state.entries[owner].renamed(buffer)
            )
        variables = {own: state.variables.pop(owner) for own, owner in self._device_tensor_pairs()}
        return ProgramState(variables, entries, state.disk_queue, owns_disk_queue=False)

    def return_state(self, added_state: ProgramState, state: ProgramState) -> None:
        """Moves changed variables back to the session; drops buffer entries that are not shared."""
        for variable, owner in self._device_tensor_pairs():
            state.variables[owner] = added_state.variables[variable]
        for buffer, entries in added_state.entries.items():
            if buffer not in self._shared:
                entries.close()

    def _device_tensor_pairs(self) -> list[tuple[Variable | Shard, Variable | Shard]]:
        """Pairs (added program's, session's) of tensors of variables outside remote buffers."""
        return [
            (device_variables.device_tensor(a), device_variables.device_tensor(b))
            for a, b in self._owner_of.items()
            if a._remote is None
        ]


def _has_same_spec(a: RemoteBuffer, b: RemoteBuffer) -> bool:
    """True if two remote buffers have equal shapes, dtypes, entries and kind."""
    specs = [(x.tensor_shape, x.tensor_dtype, x.meta_shape, x.entries, x.kind) for x in (a, b)]
    return specs[0] == specs[1]
