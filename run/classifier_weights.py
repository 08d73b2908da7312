"""Weights of a language model or a classifier in a folder, for a model with another head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from checkpoints import CheckpointError
from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays, OverlayArrays
from config.sections import RunConfig
from config.task import Seq2SeqData
from files.formatting import format_path
from modelling.model_family import get_family
from modelling.weights import Weight, WeightMap
from modelling.weights.weight_mapping import CLASSIFIER

LM_HEADS = ("lm_head.weight", "lm_head.bias", "final_logits_bias")
CLASSIFIER_HEADS = ("score.", "classification_head.")


def tensors_for_head(config: RunConfig, tensors: LazyArrays, name: str) -> LazyArrays:
    """Return the tensors of a folder that a model with the configured head has.

    Without the LM head if the model is to have none; with the names of a classifier; without the
    decoder if the encoder is the model.

    Raises:
        CheckpointError: they are of a classifier, but a language model is configured.
    """
    if config.training.head == "lm":
        head = next((n for n in tensors if n.startswith(CLASSIFIER_HEADS)), None)
        if head is not None:
            raise CheckpointError(
                f"{format_path(name)} is a classifier, with {head} and without a head for tokens, "
                f"but {config.training.objective} needs one: give --training.objective "
                "classification, regression or reward, or the language model"
            )
        return tensors
    prefix = get_family(config).classifier_prefix if config.training.head == "classifier" else ""
    is_prefixed = any(n.startswith(prefix) for n in tensors)
    kept = [n for n in tensors if n not in LM_HEADS]
    if config.training.head == "none" and isinstance(config.data, Seq2SeqData):
        kept = [n for n in kept if not n.startswith("decoder.")]
    if is_prefixed and len(kept) == len(tensors):
        return tensors
    return ArraysView(tensors, renamed={n if is_prefixed else f"{prefix}{n}": n for n in kept})


def missing_head_weights(weight_map: WeightMap, tensors: Arrays) -> list[Weight]:
    """Return the weights of a classifier's head, if a folder has none of them."""
    head = [w for m in weight_map.mappings if m.path.startswith(CLASSIFIER) for w in m.weights]
    return [] if any(weight.name in tensors for weight in head) else head


def without_head_weights(weight_map: WeightMap, head: Sequence[Weight]) -> WeightMap:
    """Return the weight map without the weights of a head."""
    return weight_map.filter_mappings(lambda mapping: {*mapping.weights}.isdisjoint(head))


def with_initialized_head(config: RunConfig, head: Sequence[Weight], weights: Arrays) -> Arrays:
    """Return a model's weights with newly initialized ones of a head; without any, themselves."""
    if not head:
        return weights
    random = {weight.name: partial(weight.init_values, config.model.seed) for weight in head}
    return OverlayArrays(LazyArrays(random), weights)
