"""Adapter folders in the format of PEFT's `save_pretrained`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.lazy_arrays import ArraysView
from checkpoints.safetensors_files import to_c_order, write_safetensors
from checkpoints.tensor_files import TensorFiles
from config.adapter import (
    ALL_LINEAR,
    PATTERNS,
    Adapter,
    ends_with_name,
    first_matching_number,
    is_inside_module,
    is_name_list,
    matches_end_of_name,
)
from config.row_ranges import format_row_ranges
from files.atomic_writing import write_json
from files.formatting import format_path
from files.json_files import JsonObject, read_json_object
from huggingface.model_folders import CONFIG
from huggingface.multimodal import IMAGE_MODULES

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_IGNORED = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying",
    "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "modules_to_save",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_dora",
    "use_rslora",
}  # fmt: skip
"""Fields that are read elsewhere, or do not change the adapter's output."""
_LOW_RANK = re.compile(r"\.lora_[\w.]+$")
"""Suffix of a low-rank tensor's name, after its module's name."""
_TOKENS = re.compile(r"\.token_adapter\.trainable_tokens_delta$")
"""Suffix of the name of trained token rows."""
_BASE_LAYER = ".base_layer."
"""Part of the names of base weights that PEFT saves with an adapted embedding or head."""
HEAD_MODULE = "lm_head"
_INITIAL = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that keep the base model's output."""


def find_base_model(folder: str | Path) -> str | None:
    """Return the model that an adapter in a folder is for; None if there is no adapter alone.

    A relative path is one from the folder, as in our exports, if there is a model.

    Raises:
        UserError: the adapter names no model.
    """
    file = Path(folder) / SETTINGS
    if not file.is_file() or (file.parent / CONFIG).exists():
        return None
    name = read_json_object(file).data.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            f"{format_path(file)} does not say base_model_name_or_path, the model that the adapter "
            "is for: add it"
        )
    beside = file.parent / name
    return str(beside) if beside.is_dir() else name


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """Convert a folder's adapter_config.json to fields of the config section `adapter`.

    Names that match no module of the weights are dropped, as in PEFT.

    Raises:
        UserError: there is no adapter, or one that is not known here.
    """
    file = Path(folder) / SETTINGS
    if not file.is_file():
        raise CheckpointError(
            f"no adapter in {format_path(folder)}: give a folder with {SETTINGS} and {WEIGHTS}"
        )
    adapter_config = read_json_object(file)
    _check_supported(adapter_config)
    modules = adapter_modules(folder)
    saved = _read_text_list(adapter_config, "modules_to_save")
    fields = {
        "rank": adapter_config.get_count("r"),
        "alpha": adapter_config.get_number("lora_alpha"),
        "dropout": adapter_config.get_number("lora_dropout")
        if "lora_dropout" in adapter_config
        else 0.0,
        "rslora": adapter_config.data.get("use_rslora") is True,
        "dora": adapter_config.data.get("use_dora") is True,
        "targets": _target_modules(adapter_config, modules.low_rank),
        "target_parameters": ",".join(_read_text_list(adapter_config, "target_parameters")) or None,
        "modules_to_save": ",".join(_complete_saved_modules(saved, modules.saved)) or None,
    }
    fields |= _token_fields(adapter_config)
    names = (
        None
        if modules.low_rank is None
        else [*modules.low_rank, *_parameter_names(adapter_config, modules)]
    )
    return fields | {name: _format_pattern(adapter_config, name, names) for name in PATTERNS}


def _parameter_names(adapter_config: JsonObject, modules: AdapterModules) -> list[str]:
    """Full names of the expert weights for which a PEFT file can have LoRA matrices."""
    suffixes = [
        name.rpartition(".")[2] for name in _read_text_list(adapter_config, "target_parameters")
    ]
    return [
        f"{m}.{end}"
        for m in modules.low_rank or ()
        for end in suffixes
        if _BASE_LAYER not in f"{m}."
    ]


class AdapterModules(NamedTuple):
    """Names of the modules that have tensors in a PEFT file, by kind of tensor such as LoRA.

    None means that there is no such file.
    """

    low_rank: Collection[str] | None = None
    saved: Collection[str] | None = None


def adapter_modules(folder: str | Path) -> AdapterModules:
    """Collect, by kind of tensor, the names of modules that have tensors in a PEFT file.

    Raises:
        CheckpointError: it is damaged.
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        return AdapterModules()
    names = list(adapter_tensors(folder))
    low_rank = dict.fromkeys(_LOW_RANK.sub("", n) for n in names if _LOW_RANK.search(n))
    other_names = [n for n in names if not (_LOW_RANK.search(n) or _TOKENS.search(n))]
    return AdapterModules(
        list(low_rank), list(dict.fromkeys(n.rpartition(".")[0] for n in other_names))
    )


def adapter_vocab_size(folder: str | Path, names: Collection[str]) -> int | None:
    """Number of rows of the first named tensor that a PEFT file has; None without one."""
    if not (Path(folder) / WEIGHTS).is_file():
        return None
    tensors = adapter_tensors(folder)
    return next((tensors.spec(name).shape[0] for name in names if name in tensors), None)


def ties_adapter_weights(folder: str | Path) -> bool:
    """True if `ensure_weight_tying` is set, and LM head and embedding have equal LoRA matrices.

    Raises:
        CheckpointError: the head has the embedding's matrices, but another rank or alpha.
    """
    adapter_config = read_json_object(Path(folder) / SETTINGS)
    if adapter_config.data.get("ensure_weight_tying") is not True:
        return False
    if not (Path(folder) / WEIGHTS).is_file():
        return True
    tensors = adapter_tensors(folder)
    ends = {".lora_embedding_A": "lora_B.weight", ".lora_embedding_B": "lora_A.weight"}
    pairs = [(n, f"{HEAD_MODULE}.{ends[end]}") for n in tensors for end in ends if n.endswith(end)]
    pairs = [(embedding, head) for embedding, head in pairs if head in tensors]
    for field in PATTERNS if pairs else ():
        pattern = adapter_config.get_dict(field) if adapter_config.data.get(field) else {}
        modules = HEAD_MODULE, pairs[0][0].rpartition(".")[0]
        if first_matching_number(pattern, modules[:1], 0) != first_matching_number(
            pattern, modules[1:], 0
        ):
            raise adapter_config.error(field, f"one that means {' and '.join(modules)} alike")
    return all(np.array_equal(tensors[embedding].T, tensors[head]) for embedding, head in pairs)


def _complete_saved_modules(names: Sequence[str], modules: Collection[str] | None) -> Sequence[str]:
    """Names of all fully saved modules; adds a resized embedding, which PEFT does not list."""
    matching = _filter_matching(names, modules, is_inside_module)
    return [
        *matching,
        *(m for m in modules or () if not any(is_inside_module(m, name) for name in matching)),
    ]


def _filter_matching(
    names: Sequence[str], modules: Collection[str] | None, matches: Callable[[str, str], bool]
) -> Sequence[str]:
    """Names that match a module of the model; all names if the modules are unknown."""
    if modules is None:
        return names
    return [name for name in names if any(matches(module, name) for module in modules)]


def _check_supported(adapter_config: JsonObject) -> None:
    """Raise CheckpointError for settings in adapter_config.json that are not supported."""
    peft_type = adapter_config.get_text("peft_type")
    if peft_type != "LORA":
        raise adapter_config.error("peft_type", "LORA")
    for name, value in adapter_config.data.items():
        is_unused = value in (None, False, "none", 0) or value == [] or value == {}
        if name == "init_lora_weights":
            is_unused = value in _INITIAL
        if name == "exclude_modules":
            is_unused = is_unused or value in IMAGE_MODULES.values()
        if not is_unused and name not in _IGNORED:
            raise adapter_config.error(name, "left out: such adapters are not known")


def _token_fields(adapter_config: JsonObject) -> dict[str, Any]:
    """Adapter fields for trained token rows, from `trainable_token_indices`.

    A list is for the embedding, an object for named modules.
    """
    field = "trainable_token_indices"
    value = adapter_config.data.get(field)
    if not value:
        return {"trainable_tokens": None, "trainable_tokens_head": True}
    if not isinstance(value, dict):
        return {
            "trainable_tokens": format_row_ranges(adapter_config.get_counts(field)),
            "trainable_tokens_head": False,
        }
    modules = adapter_config.get_object(field)
    tokens = [modules.get_counts(name) for name in value]
    has_head = [name.rpartition(".")[2] == HEAD_MODULE for name in value]
    if all(has_head) or len(tokens) > 2 or any(one != tokens[0] for one in tokens):
        raise adapter_config.error(field, "the same tokens of the embedding, and of the head")
    return {
        "trainable_tokens": format_row_ranges(tokens[0]),
        "trainable_tokens_head": any(has_head),
    }


def _read_text_list(adapter_config: JsonObject, name: str) -> Sequence[str]:
    return adapter_config.get_texts(name) if adapter_config.data.get(name) else []


def _target_modules(adapter_config: JsonObject, modules: Collection[str] | None) -> str | None:
    """Convert PEFT's `target_modules` to `adapter.targets`; a string is a regular expression."""
    value = adapter_config.data.get("target_modules")
    if value == ALL_LINEAR:
        return ALL_LINEAR
    tied = [HEAD_MODULE] if _ties_head(adapter_config, modules) else []
    if isinstance(value, str):
        return "|".join([f"({value})", *tied]) if tied or is_name_list(value) else value
    if not value and adapter_config.data.get("target_parameters"):
        return None
    names = sorted(adapter_config.get_texts("target_modules"))
    if not is_name_list(",".join(names)):
        raise adapter_config.error("target_modules", "names of modules")
    if adapter_config.data.get("layers_to_transform") not in (None, []):
        return _make_layers_regex(adapter_config, names)
    return ",".join(
        dict.fromkeys([*(_filter_matching(names, modules, ends_with_name) or names), *tied])
    )


def _ties_head(adapter_config: JsonObject, modules: Collection[str] | None) -> bool:
    """True if the LM head shares the embedding's adapter without being listed as a target."""
    return adapter_config.data.get("ensure_weight_tying") is True and HEAD_MODULE in (modules or ())


def _make_layers_regex(adapter_config: JsonObject, names: Sequence[str]) -> str:
    """Regular expression for names of modules in the layers that `layers_to_transform` lists.

    A layer's number is the first in the name, or follows the first match of `layers_pattern`.
    """
    field, pattern = "layers_to_transform", adapter_config.data.get("layers_pattern")
    is_single = isinstance(adapter_config.data[field], int)
    numbers = [adapter_config.get_count(field)] if is_single else adapter_config.get_counts(field)
    prefixes = [r".*?\.[^.]*\.(?=\d+\.)"]
    if pattern:
        patterns = (
            [pattern] if isinstance(pattern, str) else adapter_config.get_texts("layers_pattern")
        )
        prefixes = [rf"(?:.*?\.)??(?:{text})\.(?=\d+\.)" for text in patterns]
    suffixes, layers = "|".join(map(re.escape, names)), "|".join(map(str, numbers))
    return rf"{suffixes}|(?=(?>{'|'.join(prefixes)})(?:{layers})\.)(?:.*\.)?(?:{suffixes})"


def _format_pattern(
    adapter_config: JsonObject, name: str, modules: Collection[str] | None
) -> str | None:
    values = adapter_config.get_dict(name) if adapter_config.data.get(name) else {}
    if any("," in key or "=" in key for key in values):
        raise adapter_config.error(name, "one whose expressions have no comma")
    return (
        ",".join(
            f"{key}={values[key]}"
            for key in _filter_matching([*values], modules, matches_end_of_name)
        )
        or None
    )


def adapter_tensors(folder: str | Path) -> ArraysView:
    """Open an adapter's tensors lazily, by their names in the base model.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"no {WEIGHTS} in {format_path(folder)}")
    files = TensorFiles([path])
    names = [n for n in files if _BASE_LAYER not in n or _LOW_RANK.search(n)]
    return ArraysView(files, renamed={name.removeprefix(_PREFIX): name for name in names})


def make_adapter_config(
    adapter: Adapter,
    modules: tuple[Collection[str], Collection[str]],
    saved_modules: Sequence[str],
    tokens: list[int] | dict[str, list[int]] | None,
    base: str | None,
    task: str,
    tied_modules: Sequence[Sequence[str]] = (),
    parameter_names: Sequence[str] = (),
) -> dict[str, Any]:
    """Content of PEFT's adapter_config.json for an adapter.

    Args:
        modules: names of those with an adapter, and of all others, which `target_modules` must not
            mean.
        saved_modules: names for modules that are trained in full.
        tokens: whose rows of the embedding are trained, or of several modules, by name.
        base: the base model.
        task: PEFT's name of it.
        tied_modules: names of modules that have one adapter together, which PEFT needs to be told
            of each.
        parameter_names: names of experts' that have an adapter.
    """
    ranks, alphas = (
        {name: _as_integer(value(*names)) for names in tied_modules for name in names if pattern}
        | {key: _as_integer(number) for key, number in pattern.items()}
        for pattern, value in (
            (adapter.parse_pattern("rank_pattern"), adapter.lora_rank),
            (adapter.parse_pattern("alpha_pattern"), adapter.lora_alpha),
        )
    )
    return {
        "alpha_pattern": alphas,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _as_integer(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "modules_to_save": list(saved_modules) or None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": ranks,
        "revision": None,
        "target_modules": _target_suffixes(*modules),
        "target_parameters": list(parameter_names) or None,
        "task_type": task,
        "trainable_token_indices": tokens,
        "use_dora": adapter.dora,
        "use_rslora": adapter.rslora,
    }


def _as_integer(number: float) -> float:
    """Convert a number to int if its value is integral, for adapter_config.json."""
    return int(number) if number == int(number) else number


def _target_suffixes(modules: Collection[str], other_modules: Collection[str]) -> list[str]:
    """Shortest name suffixes that match only the given modules, else their full names."""
    suffixes = {name.rpartition(".")[2] for name in modules}
    if any(name.rpartition(".")[2] in suffixes for name in other_modules):
        return sorted(modules)
    return sorted(suffixes)


def write_adapter(
    folder: Path, tensors: Mapping[str, np.ndarray], settings: Mapping[str, Any]
) -> None:
    """Write the files of an adapter folder; all tensors are in memory at once.

    Args:
        tensors: by the names of the base model's modules.
    """
    write_json(folder / SETTINGS, settings)
    write_safetensors(folder / WEIGHTS, {_PREFIX + n: to_c_order(n, tensors[n]) for n in tensors})
