"""Base configurations of command lines, from saved runs and Hugging Face models.

Most command lines name neither: what reads them is imported where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.base import flatten_by_path, nest_by_path
from config.config_sources import LayeredConfig
from config.errors import ConfigError
from config.families import family_by_model_type
from config.presets import is_user_file, load_preset, merge_over
from config.run import RANDOM, Checkpoint
from config.sections import RunConfig
from config.values import is_object_store_url
from files.formatting import format_name, format_value
from files.json_files import JsonObject

OF_ONE_RUN = ("checkpoint", "eval")
"""Sections that a run which loads another one does not inherit: checkpoints and evaluation."""


class RunOrModelLoader:
    """Reads the configuration that a command line starts from: a saved run's or a HF model's."""

    def from_load(self, load: str) -> Mapping[str, Any] | None:
        """Return the configuration of a checkpoint's last undamaged step, with its saved tokenizer.

        Without a checkpoint it returns None.

        Raises:
            UserError: there is no Hugging Face model either; raised here, before errors of the
                default preset.
        """
        from checkpoints.object_store import download_if_remote
        from checkpoints.verified_loading import has_checkpoint
        from huggingface.model_folders import CONFIG as MODEL_CONFIG
        from huggingface.pretrained import get_local_folder

        load = download_if_remote(load)
        if not has_checkpoint(load) and load != RANDOM:
            get_local_folder(load, [MODEL_CONFIG])
        return self.from_run(load)

    def resolve_addresses(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Return local folders for object store addresses; downloads the checkpoint of `--load`."""
        load, save, mirror = checkpoint.load, checkpoint.save, checkpoint.mirror
        places: dict[str, Any] = {}
        if not any(is_object_store_url(folder) for folder in (load, save) if folder is not None):
            return places
        from checkpoints.object_store import download_if_remote, resolve_save_folder

        if load is not None and is_object_store_url(load):
            places["checkpoint.load"] = download_if_remote(load)
        if save is not None and is_object_store_url(save):
            if mirror not in (None, save):
                raise ConfigError("--save is an address, to which --checkpoint.mirror adds another")
            places |= {"checkpoint.save": resolve_save_folder(save), "checkpoint.mirror": save}
        return places

    def from_save(self, save: str, mirror: str | None, plans: bool) -> Mapping[str, Any] | None:
        """Return the configuration of the last undamaged step of the run that `--save` resumes."""
        from checkpoints.object_store import resolve_save_folder
        from checkpoints.object_store_lease import restore_from_mirror

        folder = resolve_save_folder(save)
        if not plans:
            restore_from_mirror(folder, save if is_object_store_url(save) else mirror)
        step, saved = self._read_newest(folder)
        return None if step is None else saved

    def from_run(self, load: str) -> Mapping[str, Any] | None:
        """Return a saved run's configuration, by folder or address; None if there is no run."""
        from checkpoints.object_store import download_if_remote
        from data.tokenizer import find_saved_tokenizer
        from files.run_folder import RunFolder

        step, saved = self._read_newest(download_if_remote(load))
        if step is None:
            return None
        inherited = {name: saved[name] for name in saved if name not in OF_ONE_RUN}
        saved_tokenizer = find_saved_tokenizer(RunFolder.from_step_folder(step))
        # The tokenizer that was kept has the chat template of a file that may be gone.
        data_settings = {"tokenizer": str(saved_tokenizer), "chat_template": None}
        settings = {"adapter": {"load": None}} if "adapter" in saved else {}
        return merge_over(
            inherited, settings | ({"data": data_settings} if saved_tokenizer else {})
        )

    def _read_newest(self, folder: str) -> tuple[Path | None, Mapping[str, Any]]:
        """Find the last undamaged step of a saved run; returns its folder and configuration."""
        from checkpoints.errors import CheckpointError, FormatVersionError
        from checkpoints.manifest import Manifest
        from checkpoints.step_folders import MANIFEST, list_step_folders
        from checkpoints.verified_loading import has_checkpoint
        from files.run_folder import CONFIG

        if not has_checkpoint(folder):
            return None, {}
        path = Path(folder)
        steps = [path] if (path / MANIFEST).is_file() else [f.path for f in list_step_folders(path)]
        for step in steps:
            try:
                manifest = Manifest.read(step)
                manifest.check_text_files(step)
            except FormatVersionError:
                raise
            except CheckpointError:
                continue  # reading the weights reports the damage
            if CONFIG in manifest.texts:
                return step, load_preset("finetuning", str(step / CONFIG))
        return None, {}

    def from_adapter(self, folder: str, config: RunConfig) -> Mapping[str, Any]:
        """Return configuration fields of a PEFT adapter: targets, untied head, new embedding rows.

        The head is untied if PEFT trained only one of head and embedding. New embedding rows come
        with their tokenizer.
        """
        from config.row_ranges import parse_row_ranges
        from huggingface.peft_files import (
            adapter_modules,
            adapter_vocab_size,
            read_adapter_config,
            ties_adapter_weights,
        )

        fields: dict[str, Any] = {"adapter": read_adapter_config(folder)}
        from modelling.model_family import get_family
        from modelling.weights.lora import unties_head

        adapted = {module for some in adapter_modules(folder) for module in some or ()}
        weight_map = get_family(config).base_weight_map(config)
        model, values = config.model, dict[str, Any]()
        if unties_head(weight_map, adapted, ties_adapter_weights(folder), folder):
            values[model.field_path("tie_word_embeddings")] = False
        data_settings = model.vocab_size
        tokens = parse_row_ranges(fields["adapter"]["trainable_tokens"], folder)
        rows = (
            adapter_vocab_size(folder, weight_map.vocabulary_names) or max(tokens, default=-1) + 1
        )
        if rows > data_settings:
            values[model.field_path("vocab_size")] = rows
            values[model.field_path("new_rows")] = f"{data_settings}-{rows - 1}"
        fields |= nest_by_path(values)
        has_tokenizer = (Path(folder) / "tokenizer_config.json").is_file()
        return fields | ({"data": {"tokenizer": folder}} if rows and has_tokenizer else {})

    def new_token_fields(self, settings: LayeredConfig) -> Mapping[str, Any]:
        """Return the configuration fields that add embedding rows to a Hugging Face model."""
        config = settings.config
        sets_size = settings.is_set_by_flag(config.model.field_path("vocab_size"))
        if not sets_size and not config.model.add_tokens and config.uses_model_tokenizer:
            return {}
        from planning.new_embedding_rows import choose_new_rows, loads_hf_model

        if not loads_hf_model(settings):
            return {}
        load = str(config.checkpoint.load)
        return choose_new_rows(settings, self._published_vocab_size(settings, load))

    def _published_vocab_size(self, settings: LayeredConfig, model: str) -> int:
        """Return the embedding rows of a Hugging Face model; a preset of that model tells them."""
        source = settings.sources[0]
        of_preset = flatten_by_path(source.values)
        is_preset = source.is_exhaustive and not is_user_file(source.name)
        if is_preset and of_preset.get("checkpoint.load") == model:
            rows = settings.section.from_dict(source.values).model.vocab_size
        else:
            described = flatten_by_path({"model": self.from_model(model)["model"]})
            rows = described[settings.config.model.field_path("vocab_size")]
        return int(rows)

    def from_model(self, name: str) -> Mapping[str, Any]:
        """Return the configuration fields of a Hugging Face model: sizes, weights and tokenizer."""
        from huggingface.classifiers import classifier_run_settings, is_classifier
        from huggingface.model_folders import CONFIG as MODEL_CONFIG
        from huggingface.multimodal import TEXT_MODEL_TYPES
        from huggingface.pretrained import get_local_folder, read_pretrained
        from huggingface.sentence_transformers_files import embedding_run_settings

        found = read_pretrained(name)
        kind, known = found.hf_config.get_text("model_type"), family_by_model_type()
        if kind not in known:
            there = dict.fromkeys([*known, *TEXT_MODEL_TYPES])
            raise ConfigError(
                f"{format_name(name)} is of the kind {format_value(kind)}, "
                f"{_unsupported_reason(kind)}; there are: {', '.join(there)}"
            )
        # It imports JAX, which takes seconds: mistakes in the command line come first.
        from modelling.model_family import load_family

        family = load_family(known[kind])
        folder = get_local_folder(name, [MODEL_CONFIG])
        embedding, hf_config = embedding_run_settings(folder, found.hf_config)
        model = family.from_config_json(hf_config)
        if family.infers_tied_head and found.has_head is False:
            model["embedding"]["tied"] = True
        of_model = {
            "family": known[kind],
            "model": model
            | ({"multimodal_parent": _absolute_folder(name)} if found.multimodal_type else {}),
            "checkpoint": {"load": name},
            "data": {"tokenizer": _absolute_folder(name)} | exported_task_fields(found.hf_config),
        }
        if not is_classifier(found.hf_config):
            return merge_over(of_model, embedding)
        return merge_over(of_model, classifier_run_settings(found.hf_config))


def _unsupported_reason(model_type: str) -> str:
    """Return the text that says why a Hugging Face `model_type` is not supported."""
    from config.unsupported_models import unsupported_reason

    reason = unsupported_reason(model_type)
    return "which is not known" if reason is None else f"{reason}, which is not there"


def _absolute_folder(name: str) -> str:
    """Return the absolute path of an existing folder; names on the hub are returned unchanged."""
    return os.path.abspath(name) if os.path.isdir(name) else name


def exported_task_fields(hf_config: JsonObject) -> dict[str, str]:
    """Return the task fields of a config.json that this program exported; {} for other files."""
    from huggingface.model_folders import TASK_FIELDS, TASK_NAME, TASK_PARAMS

    here: Any = hf_config.data
    for name in (TASK_PARAMS, TASK_NAME):
        here = here.get(name) if isinstance(here, dict) else None
    return {n: here[n] for n in TASK_FIELDS if n in here} if isinstance(here, dict) else {}


CONFIG_LOADER = RunOrModelLoader()
