"""Export of models to folders for transformers, and of adapters to folders for PEFT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import popxl
from checkpoints.errors import raise_damage_on_all_processes
from checkpoints.lazy_arrays import Arrays, ArraysView
from config.adapter import Adapter, is_inside_module
from config.errors import ConfigError
from config.run import RANDOM
from config.sections import RunConfig
from config.values import split_names
from data.data_cache import DataCache
from data.pipeline import Pipeline
from data.text_samples import tokenizer_with_end_token
from files.formatting import format_name, format_path
from huggingface.classifiers import classifier_config_json_fields
from huggingface.hub import DataUnavailable
from huggingface.model_card_text import AdapterInfo
from huggingface.model_folders import (
    TASK_FIELDS,
    TASK_NAME,
    TASK_PARAMS,
    check_can_write_folder_to,
    new_model_folder,
    write_hf_directory,
)
from huggingface.multimodal import IMAGE_MODULES
from huggingface.peft_files import make_adapter_config, write_adapter
from huggingface.sentence_transformers_files import (
    embedding_config_json_fields,
    write_sentence_transformers_files,
)
from modelling.model_family import get_family
from modelling.weights import WeightMap
from modelling.weights.lora import (
    adapted_modules,
    adapted_parameters,
    add_tied_copies,
    fully_trained_modules,
    has_tied_head,
    has_trainable_tokens,
    merge_adapters,
    tied_modules,
)
from modelling.weights.weight_mapping import module_name
from planning.hardware.memory_check import check_lower_bound
from run.base_model_ref import BaseModelRef
from run.export_extras import base_generation_config, copy_processor_configs, merge_multimodal_parts
from run.initial_state import InitialState
from run.model_card import RunRecords, write_model_card
from run.weight_loading import load_weights
from terminal.screen import is_first_process, say


def export_model(
    config: RunConfig,
    weights: Arrays,
    folder: str | Path,
    run: RunRecords | None = None,
    data_cache: DataCache | None = None,
    base: BaseModelRef | None = None,
    precision: str | None = None,
) -> None:
    """Write weights, config, tokenizer and model card to a folder; of adapters only the adapter.

    If the hub cannot be reached for the tokenizer, the model is written without one. Collective;
    the first process writes.

    Args:
        weights: unsharded weights by logical name; each is read once.
        run: the run that trained the weights; None: they are from `checkpoint.load`.
        data_cache: data that is already loaded; None: nothing.
        base: base model of the adapters.
        precision: dtype to write; None: unchanged.

    Raises:
        ConfigError: a weight is outside of the range of the precision.
        CheckpointError: the folder exists and is not empty, or cannot be written.
    """
    family, adapts = get_family(config), config.adapter.rank > 0
    exported = _select_exported_weights(config, family.weight_map(config))
    if adapts:
        names = [weight.name for weight in exported.weights]
        weights = ArraysView(weights, names)
    if not is_first_process():  # reading a weight can gather it from all processes
        for name in weights:
            weights[name]
        return
    data = Pipeline(config, family.sample_format, data_cache or DataCache())
    tokenizer, load = None, config.checkpoint.load
    try:
        tokenizer, config = data.tokenizer, data.config
    except DataUnavailable as error:
        say(f"warning: no tokenizer is written: {error}")

    embeds = config.training.row_type == "contrastive"
    if embeds and adapts:
        raise ConfigError("sentence-transformers loads whole models: give --merge original")

    def write_extra_files(draft: Path) -> None:
        if tokenizer is not None:
            appends_end = embeds and config.training.pooling == "eos"
            hf_tokenizer = tokenizer.hf_tokenizer
            if appends_end:
                hf_tokenizer = tokenizer_with_end_token(tokenizer)
            hf_tokenizer.save_pretrained(draft)
        if embeds:
            write_sentence_transformers_files(draft, config)
        name, shape = Path(folder).resolve().name, family.sample_format
        labels = config.num_labels if config.training.head == "classifier" else None
        write_model_card(
            draft, name, shape, load, run, adapter_of if adapts else None, labels, embeds
        )

    named = None if base is None else base.name_relative_to(folder)
    grows = config.model.new_rows is not None
    adapter_of = AdapterInfo(named, config.model.vocab_size if grows else None)
    if adapts:
        adapter_weights = {name: weights[name] for name in weights}
        settings = _adapter_settings(config, named)
        with new_model_folder(folder) as draft:
            write_adapter(
                draft, add_tied_copies(exported, exported.to_hf(adapter_weights)), settings
            )
            write_extra_files(draft)
    else:
        _write_model(config, weights, folder, write_extra_files, precision)
    step = "" if run is None else f" of step {run.step}"
    say(f"wrote {'an adapter' if adapts else 'a model'}{step} for Hugging Face to {folder}")


def _select_exported_weights(config: RunConfig, weight_map: WeightMap) -> WeightMap:
    """Select the weights that an adapter file contains, by their mapping to Hugging Face names.

    These are all trainable weights, and frozen weights with new token rows, which the base lacks.
    """
    new = config.model.embedding_rows_to_initialize()
    lacking = {
        n
        for n in weight_map.vocabulary_names
        if new and not has_trainable_tokens(weight_map, n, new)
    }
    return weight_map.filter_mappings(
        lambda row: row.trainable or any(w.name in lacking for w in row.weights)
    )


def _write_model(
    config: RunConfig,
    weights: Arrays,
    folder: str | Path,
    write_extra_files: Callable[[Path], None],
    precision: str | None,
) -> None:
    if config.has_frozen_weights:  # base and trained weights can differ in dtype
        weights = ArraysView(weights, transform=partial(_cast_weight, config.model.precision))
    family = get_family(config)
    files = family.weight_map(config).to_hf(weights)
    hf_config = family.to_config_json(config)
    if config.training.head == "classifier":
        hf_config |= classifier_config_json_fields(config, hf_config)
    elif config.training.head == "none":
        hf_config |= embedding_config_json_fields(config, hf_config)
    hf_config |= {TASK_PARAMS: {TASK_NAME: task_fields(config)}}
    files, hf_config, multimodal_folder = merge_multimodal_parts(config, files, hf_config)
    if precision is not None:
        files = ArraysView(files, transform=partial(_cast_weight, precision))

    def write_all_extra_files(draft: Path) -> None:
        write_extra_files(draft)
        if multimodal_folder is not None:
            copy_processor_configs(multimodal_folder, draft)

    settings = base_generation_config(config)
    write_hf_directory(
        folder, files, hf_config, add_files=write_all_extra_files, generation=settings
    )


def _adapter_settings(config: RunConfig, base_name: str | None) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json for the configured adapter.

    Args:
        base_name: name of the base model.
    """
    family, adapter = get_family(config), config.adapter
    weight_map = family.weight_map(config)
    task = "SEQ_2_SEQ_LM" if family.sample_format.name == "seq2seq" else "CAUSAL_LM"
    task = "SEQ_CLS" if config.training.head == "classifier" else task
    saved = list(split_names(adapter.modules_to_save)) if config.training.trainable is None else []
    more = [
        m
        for m in fully_trained_modules(weight_map)
        if not any(is_inside_module(m, name) for name in saved)
    ]
    modules, tokens = adapted_modules(weight_map), _trainable_token_indices(weight_map)
    full_modules, tied = [*saved, *more], tied_modules(weight_map)
    experts = adapted_parameters(weight_map)
    settings = make_adapter_config(
        adapter, modules, full_modules, tokens, base_name, task, tied, experts
    )
    return settings | {
        "exclude_modules": IMAGE_MODULES.get(getattr(config.model, "model_type", "")),
        "ensure_weight_tying": has_tied_head(
            weight_map, _select_exported_weights(config, weight_map).hf_names.aliases.values()
        ),
    }


def _trainable_token_indices(weight_map: WeightMap) -> Any:
    """Return PEFT's `trainable_token_indices`; a list if a single module has trained rows."""
    tokens = {
        module_name(name): list(tokens.rows) for name, tokens in weight_map.trainable_tokens.items()
    }
    return tokens if len(tokens) > 1 else next(iter(tokens.values()), None)


def _config_dtype(config: RunConfig) -> np.dtype:
    return np.dtype(popxl.dtype.from_name(config.model.precision).as_numpy())


def _cast_weight(precision: str, name: str, weight: np.ndarray) -> np.ndarray:
    """Cast a floating-point weight to another precision; integer weights stay."""
    if np.issubdtype(weight.dtype, np.integer):
        return weight
    with np.errstate(over="ignore"):
        new: np.ndarray = weight.astype(popxl.dtype.from_name(precision).as_numpy(), copy=False)
    if not np.isfinite(new).all():
        raise ConfigError(
            f"{format_name(name)} has values beyond the range of {precision}: give --precision "
            "bfloat16 or float32"
        )
    return new


def task_fields(config: RunConfig) -> dict[str, str]:
    """Return the data fields that describe the task, to store in config.json."""
    values = {name: getattr(config.data, name, None) for name in TASK_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def export_checkpoint(
    config: RunConfig, folder: str, precision: str | None = None, merge: str | None = None
) -> None:
    """Export the checkpoint, model or random weights of `checkpoint.load`; see `export_model`.

    Args:
        merge: merge adapters into the "original" or the "dequantized" weights of the base model,
            and write the merged model.
    """
    check_can_write_folder_to(folder)
    check_lower_bound(config)
    weight_map = get_family(config).weight_map(config)
    if config.checkpoint.load == RANDOM:
        export_model(
            config, weight_map.init_weights(config.model.seed), folder, precision=precision
        )
        return

    def write_model(start: InitialState) -> None:
        weights, config_to_export = start.tensors, config
        if merge:
            quant = config.model.quant if merge == "dequantized" else None
            weights = merge_adapters(weight_map, weights, _config_dtype(config), quant)
            config_to_export = _without_adapter(config)
            if start.base is not None:
                quantized_text = "" if quant is None else f"what is left in {quant.bits} bits of "
                say(f"the adapters are merged into {quantized_text}the weights of "
                    f"{format_path(start.base.name)}")  # fmt: skip
        with raise_damage_on_all_processes():
            if is_first_process():
                record, base = _run_info(config, start), start.base
                export_model(
                    config_to_export, weights, folder, record, base=base, precision=precision
                )

    adapts = config.adapter.rank > 0 and not merge
    load_weights(config, weight_map, needs_base=not adapts).load_with_fallback(write_model)


def _without_adapter(config: RunConfig) -> RunConfig:
    """Return the config of the model without adapters, with all weights trainable."""
    training = replace(config.training, trainable=None, frozen=None)
    return replace(config, adapter=Adapter(), training=training)


def _run_info(config: RunConfig, start: InitialState) -> RunRecords | None:
    """Return the records of the run in `checkpoint.load`; None if that is not a run."""
    load = config.checkpoint.load
    if load is None or start.checkpoint is None:
        return None
    saved = start.checkpoint.metadata.get("config")
    run_config = saved if isinstance(saved, dict) else config.to_dict()
    return RunRecords.from_checkpoint(load, start.step, run_config)
