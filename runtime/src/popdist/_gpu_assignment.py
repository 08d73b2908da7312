"""Assignment of a host's GPUs to its processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

_GPU_LINE = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[\w-]+)\)", re.MULTILINE)
_SECONDS = 30


def assign_gpus(index: int, processes: Sequence[tuple[str, Sequence[str]]]) -> list[int] | None:
    """Returns the indices of the visible GPUs that a process uses; None means all visible GPUs.

    Processes of a host that see the same GPUs share them equally, in order. Those that see
    different GPUs were assigned by their launcher.

    Args:
        processes: host and visible GPUs of each process.
    """
    host, visible = processes[index]
    local = [i for i, (other_host, _) in enumerate(processes) if other_host == host]
    see_same_gpus = all(list(processes[i][1]) == list(visible) for i in local)
    share = len(visible) // len(local)
    if len(local) == 1 or not see_same_gpus or not share:
        return None
    first = local.index(index) * share
    return list(range(first, first + share))


def visible_gpus() -> list[str]:
    """Returns the NVIDIA GPUs that this process can use, by UUID where it is known."""
    files = os.listdir("/dev") if os.path.isdir("/dev") else []
    return list_gpu_names(os.environ, files, _parse_uuids(_run_nvidia_smi()))


def list_gpu_names(
    environment: Mapping[str, str], device_files: Sequence[str], uuids: Mapping[str, str]
) -> list[str]:
    """Returns GPU names from CUDA_VISIBLE_DEVICES, else from `nvidia-smi`, else from /dev.

    Numbers count the GPUs that a process can see: in a control group, as `srun --gpus-per-task`
    makes them, each task's are 0 and up, whichever they are.
    """
    cuda_visible = environment.get("CUDA_VISIBLE_DEVICES")
    if cuda_visible is not None:
        return [uuids.get(name, name) for name in cuda_visible.split(",") if name]
    numbers = sorted(uuids, key=int)
    return [uuids[n] for n in numbers] or sorted(
        f for f in device_files if re.fullmatch(r"nvidia\d+", f)
    )


def _parse_uuids(nvidia_smi_output: str) -> dict[str, str]:
    """Parses the output of `nvidia-smi -L` into UUIDs by GPU number."""
    return dict(_GPU_LINE.findall(nvidia_smi_output))


def _run_nvidia_smi() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
