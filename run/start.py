"""Where a run starts: random weights, a Hugging Face model, or a checkpoint of an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from checkpoints import (
    Checkpoint,
    CheckpointError,
    DamagedError,
    TensorFiles,
    has_checkpoint,
    load_checkpoint,
)
from checkpoints.parts import Part, PartialReader
from config.agreement import agree
from config.base import flattened
from config.errors import UserError
from config.model import TiedEmbedding
from config.sections import RunConfig
from files.json_files import Fields
from files.lazy import Lazy
from files.shown import shown_name, shown_path
from huggingface.folders import hf_description, read_hf_directory
from huggingface.models import RANDOM, local_model
from huggingface.peft_files import AdapterTensors
from huggingface.wrappers import TextTensors, text_part, wrapper_of
from modelling.spec import family_of
from modelling.weights import FP8, OPTIMIZER, WeightTable
from modelling.weights.merging import begun
from modelling.weights.mxfp4 import parts_of_blocks
from modelling.weights.row import is_of_adapter, is_trained
from modelling.weights.state_forms import in_form, kept_state
from run.frozen_base import Base, Verified
from run.over import Over
from terminal.screen import is_first_process, say

Tensors = Mapping[str, np.ndarray]
ModelTensors = TensorFiles | TextTensors | AdapterTensors
Used = TypeVar("Used")

MODEL = "model"
"""Name under which a checkpoint's metadata have Hugging Face's description of its model."""

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_IGNORED = {
    "architectures", "attn_pdrop", "bos_token_id", "decoder_start_token_id", "dropout_rate",
    "embd_pdrop", "eos_token_id", "initializer_range", "n_positions", "pad_token_id",
    "resid_pdrop", "tie_word_embeddings",
}  # fmt: skip
"""Entries of a description that do not affect what the weights compute."""


_COMPARED_BY_DIGEST = ("data.train", "data.validation", "data.tokenizer", "data.chat_template")
"""These may name the same data in several ways."""


@dataclass(frozen=True)
class Start:
    """The state a run starts from.

    Attributes:
        tensors: weights and, when a run is continued, optimizer state, by logical name.
        step: number of optimizer steps done.
        data: state of the data loader; None: from the beginning.
        source: where it comes from, for people.
        skipped_steps: how many of the steps left the state unchanged.
        best: state of the watch over the best evaluation; None: there is none.
        sha256: digest of what was read, as far as there is one.
        checkpoint: what it is a state of, if it is one that was saved.
        base: which model its weights are that are not trained; None: not known.
        reload: finds the start anew.
    """

    tensors: Tensors
    step: int = 0
    data: dict[str, Any] | None = None
    source: str = "random weights"
    skipped_steps: int = 0
    best: dict[str, Any] | None = None
    sha256: str = ""
    checkpoint: Checkpoint | None = None
    base: Base | None = None
    reload: Callable[[], Start] | None = None

    def load_with_fallback(self, use: Callable[[Start], Used]) -> tuple[Start, Used]:
        """Let `use` read the state; if it turns out to be damaged, that of the step before.

        Values are verified as they are read, so that each is read once.

        Args:
            use: raises DamagedError on all processes, as `sessions` do.

        Returns:
            The start whose state was used, and what `use` made of it.

        Raises:
            CheckpointError: there is no other.
        """
        start = self
        while True:
            try:
                return start, use(start)
            except DamagedError as error:
                if start.checkpoint is None or start.reload is None:
                    raise
                start.checkpoint.set_aside(str(error))
            start = start.reload()


def _reloadable(find: Callable[[], Start]) -> Start:
    return replace(find(), reload=partial(_reloadable, find))


def starting_point(config: RunConfig, table: WeightTable, fresh: bool = False) -> Start:
    """Where a training run starts.

    If `checkpoint.save` has a run, it is continued, by the same command any number of times.
    Otherwise it is the state that `checkpoint.load` names, or random weights if that names none or
    "random". A checkpoint there continues its run, at the step and the sample it was saved at; with
    `checkpoint.load_optimizer` false, a new run starts from its weights.

    Args:
        fresh: leave alone what `checkpoint.save` has.

    Raises:
        UserError: nothing usable is there, the weights do not fit the configured model, or the run
            in `checkpoint.save` is one of another model or other data.
    """
    return _reloadable(lambda: _starting_point(config, table, fresh))


def _starting_point(config: RunConfig, table: WeightTable, fresh: bool) -> Start:
    load, save = config.checkpoint.load, config.checkpoint.save
    places = {"--save": save, "--load": load}
    agree(
        {
            f"steps in {n}": place is not None and has_checkpoint(place)
            for n, place in places.items()
        }
    )
    if save is not None and not fresh and has_checkpoint(save):
        checkpoint = load_checkpoint(save, verify=False)
        saved = flattened(_mapping(_metadata(checkpoint), "config") or {})
        if not _is_within(load, save) or saved.get("checkpoint.load") == load:
            _check_same_run(saved, config, save)
            model = load if load != RANDOM and load and not has_checkpoint(load) else None
            return _continued(config, checkpoint, table, save, "--fresh starts over", model)
    if load is None or load == RANDOM:
        random = table.base.initial(config.model.seed)
        return Start(_adapted(config, table, random), base=Base(RANDOM))
    if not has_checkpoint(load):
        return _of_model(config, table, load)
    checkpoint = load_checkpoint(load, verify=False)
    _check_adapter(config, table, checkpoint, load)
    if not config.checkpoint.load_optimizer:
        weights = whole_weights(config, checkpoint, table, load)
        source = f"the weights of step {checkpoint.step} in {load}"
        return _of_checkpoint(checkpoint, table, weights, source)
    advice = "--checkpoint.load_optimizer false starts a new run from its weights"
    return _continued(config, checkpoint, table, load, advice)


def _of_model(config: RunConfig, table: WeightTable, name: str) -> Start:
    """The weights of a Hugging Face model."""
    folder = local_model(name)
    description = hf_description(folder)
    tensors = _language_model(read_hf_directory(folder), description, name)
    if isinstance(tensors, TextTensors):
        description = text_part(Fields(description, name), tensors).data
    _check_model(config, description, name)
    base = table.base
    _check_head(config, base, tensors, name)
    _check_fit(base, tensors, tensors, name)
    weights = _adapted(config, table, _Finite(config, base.renamed(tensors), name))
    return Start(weights, source=name, sha256=tensors.fingerprint(), base=Base.at(name))


def _adapted(config: RunConfig, table: WeightTable, weights: Tensors) -> Tensors:
    """The weights of a base model with those of the table's adapters: `adapter.load` has them, or
    they begin."""
    own, folder = table.only(is_of_adapter), config.adapter.load
    if not own.weights:
        return weights
    if folder is None:
        return Over(begun(table, weights, config.model.seed), weights)
    alone = config.changed({"training.trained": None, "training.frozen": None})
    own, files = family_of(config).weights(alone).only(is_trained), AdapterTensors(folder)
    _check_fit(own, files, files, folder)
    return Over(_Finite(config, own.renamed(files), folder), weights)


def _language_model(
    files: TensorFiles, description: dict[str, Any] | None, name: str
) -> ModelTensors:
    """The weights in a model's files, or those of its text part."""
    kind = wrapper_of(description or {})
    if kind is None:
        return files
    tensors = TextTensors(files)
    say(
        f"{shown_path(name)} is a {kind}: its text part is read, the other {len(tensors.others)} "
        "weights stay as they are"
    )
    return tensors


def _check_head(config: RunConfig, table: WeightTable, tensors: Tensors, name: str) -> None:
    """Raise CheckpointError if the head of a Hugging Face model is its embedding, against the
    configuration: the config.json of a T5 does not say it."""
    head = "lm_head.weight"
    if head in tensors or all(weight.name != head for weight in table.weights):
        return
    if not isinstance(config.model.embedding, TiedEmbedding):
        return  # the check of all weights says it
    raise CheckpointError(
        f"{shown_path(name)} has no {head}: if the model's head is its embedding, give "
        "--model.embedding.tied true"
    )


def _continued(
    config: RunConfig,
    checkpoint: Checkpoint,
    table: WeightTable,
    folder: str,
    advice: str,
    model: str | None = None,
) -> Start:
    """The state of a run that goes on; `model` is where its base is said to be."""
    whole_weights(config, checkpoint, table, folder)  # which checks that they fit
    if not any(name.startswith(f"{OPTIMIZER}/") for name in checkpoint.tensors):
        raise CheckpointError(
            f"the checkpoint in {folder} has no optimizer state to continue with: {advice}"
        )
    if set(_names_of_weights(checkpoint)) != {weight.name for weight in table.trained}:
        raise CheckpointError(
            f"the run in {shown_path(folder)} trains other weights than training.trained and "
            f"frozen mean: continue it as it was; {advice}"
        )
    tensors = _Finite(config, checkpoint.tensors, folder)
    state = _in_form(config, tensors, checkpoint.tensors, table, folder)
    changed = ", its optimizer state in another form from now on" if state is not tensors else ""
    metadata = _metadata(checkpoint)
    return Start(
        _with_base(config, state, checkpoint, table, folder, model),
        checkpoint.step,
        _mapping(metadata, "data"),
        f"step {checkpoint.step} in {folder}{changed}",
        metadata.count("skipped_steps") if "skipped_steps" in metadata else 0,
        _mapping(metadata, "best"),
        checkpoint.sha256,
        checkpoint,
        Base.saved(metadata),
    )


def _in_form(
    config: RunConfig, tensors: Tensors, files: TensorFiles, table: WeightTable, folder: str
) -> Tensors:
    """The tensors of a checkpoint with optimizer state as the run keeps it.

    Raises:
        CheckpointError: it is the state of another optimizer.
    """
    kept = kept_state(config, table)
    state = in_form(tensors, {name: files.spec(name) for name in files}, kept, config)
    if not isinstance(state, str):
        return state
    raise CheckpointError(
        f"the checkpoint in {shown_path(folder)} has no {state} of shape {kept[state].shape}, "
        f"which {config.training.optimizer.name} as configured needs: continue with that run's "
        "optimizer, or give --checkpoint.load_optimizer false"
    )


def _metadata(checkpoint: Checkpoint) -> Fields:
    return Fields(checkpoint.metadata, f"the manifest of {shown_path(checkpoint.path)}")


def _mapping(metadata: Fields, name: str) -> dict[str, Any] | None:
    """An object among the metadata; None if there is none."""
    return None if metadata.data.get(name) is None else metadata.mapping(name)


def _is_within(load: str | None, save: str) -> bool:
    """Whether `load` names the run in `save`, or one of its steps."""
    return load is not None and Path(load).resolve().is_relative_to(Path(save).resolve())


def saved_base(start: Start, table: WeightTable) -> dict[str, Any]:
    """What checkpoints say of the weights that they do not hold; process 0 writes it."""
    if not table.frozen or not is_first_process():
        return {}
    assert start.base is not None, "who starts to train knows where its weights are"
    return start.base.known(start.tensors, table.frozen).record()


def _check_same_run(saved: Mapping[str, Any], config: RunConfig, folder: str) -> None:
    """Raise CheckpointError if the run in a folder has another model, or other data.

    Args:
        saved: that run's configuration by dotted names, as far as it is known.
    """
    now = flattened(config.to_dict())
    for name in sorted(saved.keys() & now.keys()):
        if name in _COMPARED_BY_DIGEST or not name.startswith(("model.", "data.")):
            continue
        if saved[name] != now[name]:
            raise CheckpointError(
                f"{shown_path(folder)} has a run with {name} {shown_name(saved[name], 35)}, but "
                f"this one has {shown_name(now[name], 35)}: continue that run as it was, give "
                "another --save, or --fresh to delete it and start over"
            )


def load_weights(config: RunConfig, table: WeightTable) -> Start:
    """The weights of what `checkpoint.load` names, for generation, and FP8 state if it is needed.

    Raises:
        UserError: as for `starting_point`, or if it names nothing.
    """
    return _reloadable(lambda: _load_weights(config, table))


def _load_weights(config: RunConfig, table: WeightTable) -> Start:
    load = config.checkpoint.load
    if load is None or load == RANDOM:
        raise CheckpointError(
            "there are no weights: give --load DIR, a folder that run_finetuning.py --save wrote, "
            "or a Hugging Face model"
        )
    needs_scales = config.fp8.enabled and config.fp8.recipe == "delayed"
    if not has_checkpoint(load):
        if needs_scales:
            raise _no_scales(load)
        return _of_model(config, table, load)
    checkpoint = load_checkpoint(load, verify=False)
    _check_adapter(config, table, checkpoint, load)
    weights = whole_weights(config, checkpoint, table, load)
    if needs_scales:
        weights = _with_scales(config, weights, checkpoint.tensors, load)
    start = _of_checkpoint(checkpoint, table, weights, f"step {checkpoint.step} in {load}")
    return replace(start, step=checkpoint.step)


def _with_scales(config: RunConfig, weights: Tensors, tensors: Tensors, load: str) -> Tensors:
    names = [n for n in tensors if n.startswith(f"{FP8}/")]
    if not names:
        raise _no_scales(load)
    return _Finite(config, tensors, load, [*weights, *names])


def _no_scales(load: str) -> CheckpointError:
    return CheckpointError(
        f"{load} has no FP8 scales to generate with: train with --fp8.enabled, or give "
        "--fp8.recipe current, whose scales follow from the operands"
    )


def whole_weights(
    config: RunConfig, checkpoint: Checkpoint, table: WeightTable, load: str
) -> Tensors:
    """All weights of a checkpoint's model, each read when it is asked for.

    Raises:
        CheckpointError: they do not fit the configuration, or those that the checkpoint does not
            hold cannot be had.
    """
    tensors, names = checkpoint.tensors, _names_of_weights(checkpoint)
    if table.only(is_of_adapter).weights and not _has_adapters(table, checkpoint):
        return _adapted(config, table, whole_weights(config, checkpoint, table.base, load))
    _check_model(config, checkpoint.metadata.get(MODEL), load)
    base = Base.saved(_metadata(checkpoint))
    frozen = {} if base is None else base.sha256 or {}
    _check_fit(table, tensors, names, load, frozen)
    own = _Finite(config, tensors, load, names)
    return _with_base(config, own, checkpoint, table, load)


def _has_adapters(table: WeightTable, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has some of the table's adapters; else it has what they are for."""
    return any(w.name in checkpoint.tensors for w in table.only(is_of_adapter).weights)


def _check_adapter(
    config: RunConfig, table: WeightTable, checkpoint: Checkpoint, load: str
) -> None:
    if config.adapter.load is not None and _has_adapters(table, checkpoint):
        raise CheckpointError(
            f"the run in {shown_path(load)} has adapters of its own: leave out --adapter.load, or "
            "--load the model that they are for"
        )


def _names_of_weights(checkpoint: Checkpoint) -> list[str]:
    return [n for n in checkpoint.tensors if not n.startswith((f"{OPTIMIZER}/", f"{FP8}/"))]


def _of_checkpoint(
    checkpoint: Checkpoint, table: WeightTable, weights: Tensors, source: str
) -> Start:
    """A start from the weights of a checkpoint alone. The base is the checkpoint's own if that has
    all weights that are not trained, else the checkpoint."""
    base = Base.saved(_metadata(checkpoint))
    if base is None or base.sha256 is None or not base.sha256.keys() >= {*table.frozen}:
        base = Base.at(checkpoint.path)
    return Start(weights, source=source, sha256=checkpoint.sha256, checkpoint=checkpoint, base=base)


def _with_base(
    config: RunConfig,
    own: Tensors,
    checkpoint: Checkpoint,
    table: WeightTable,
    load: str,
    model: str | None = None,
) -> Tensors:
    """What a checkpoint holds, with the weights that it does not.

    Args:
        model: where the base is said to be.
    """
    base = Base.saved(_metadata(checkpoint))
    if base is None:
        return own
    place = config.checkpoint.base or model or base.name
    try:
        weights = _base_weights(config, table.base, place)
    except UserError as error:
        raise CheckpointError(
            f"the run in {shown_path(load)} holds what it trained, and {shown_path(place)} the "
            f"other weights, which cannot be had: {error}; --checkpoint.base says where they are"
        ) from error
    return Over(own, Verified(base, weights, (load, place)))


def _base_weights(config: RunConfig, table: WeightTable, place: str) -> Tensors:
    if place == RANDOM:
        return table.initial(config.model.seed)
    if has_checkpoint(place):
        return whole_weights(config, load_checkpoint(place, verify=False), table, place)
    return _of_model(config, table, place).tensors


def _check_model(config: RunConfig, theirs: Any, load: str) -> None:
    """Raise CheckpointError if weights were made for a model that computes something else.

    Args:
        theirs: Hugging Face's description of that model, as far as there is one. What it leaves
            out is not compared; shapes are compared with the weights themselves.
    """
    if not isinstance(theirs, dict):
        return
    family = family_of(config)
    ours, theirs = family.to_config_json(config), family.normalise(config, theirs)
    for name in sorted(ours.keys() & theirs.keys() - _IGNORED):
        if theirs[name] is not None and theirs[name] != ours[name]:
            raise CheckpointError(
                f"the weights in {shown_path(load)} belong to a model with {name} "
                f"{shown_name(theirs[name], 35)}, but the configuration has "
                f"{shown_name(ours[name], 35)}: use the configuration they were made with"
            )


class _Finite(Lazy[np.ndarray]):
    """Some of the tensors in a place, which raise CheckpointError when one with NaN or infinity is
    read, unless that is allowed."""

    concurrent: ClassVar[bool] = True
    """Several threads may read some at a time."""

    def __init__(
        self, config: RunConfig, tensors: Tensors, load: str, names: Iterable[str] | None = None
    ) -> None:
        """Args: `names`: of those that there are; None: all."""
        super().__init__(dict.fromkeys(tensors if names is None else names))
        self._allowed, self._tensors, self._load = config.checkpoint.nonfinite, tensors, load

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._checked(name, self._tensors[name])

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """Like `PartialReader`."""
        if not isinstance(self._tensors, PartialReader):
            return self[name]
        return self._checked(name, self._tensors.some(name, wanted))

    def _checked(self, name: str, array: np.ndarray) -> np.ndarray:
        if not self._allowed and not np.isfinite(array).all():
            raise CheckpointError(
                f"{name} in {self._load} has NaN or infinity: take weights of an earlier step, or "
                "accept them by --checkpoint.nonfinite"
            )
        return array


def _check_fit(
    table: WeightTable,
    files: ModelTensors,
    names: Iterable[str],
    load: str,
    elsewhere: Collection[str] = (),
) -> None:
    """Raise CheckpointError unless the weights `names` of `files` are those of the model, together
    with those that are `elsewhere`."""
    specs = {name: files.spec(name) for name in names}
    packed = parts_of_blocks(specs)
    wrong = [n for n, spec in specs.items() if spec.dtype.name not in _FLOATS and n not in packed]
    if wrong:
        raise CheckpointError(
            f"{wrong[0]} in {load} is {specs[wrong[0]].dtype.name}, but weights are one of "
            f"{', '.join(_FLOATS)}"
        )
    try:
        others = {w.name: w.shape for w in table.weights if w.name in elsewhere}
        table.check_shapes(others | {name: spec.shape for name, spec in specs.items()})
    except ValueError as error:
        raise CheckpointError(f"{load}: {error}") from error
