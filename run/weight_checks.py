"""Checks of weights: shapes and config before reading; finite values and SHA-256 on reading."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from checkpoints import CheckpointError
from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays
from config.sections import RunConfig
from files.formatting import format_name, format_path
from modelling.model_family import get_family
from modelling.weights import WeightMap
from modelling.weights.variables import OPTIMIZER_PREFIX
from modelling.weights.weight_map import FP8_PREFIX

HEAD = "lm_head.weight"
_FLOAT16_OVERFLOW = 65520  # smallest value that float16 rounds to infinity
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_IGNORED_CONFIG_KEYS = {
    "activation_dropout", "architectures", "attention_dropout", "attn_pdrop", "bos_token_id",
    "decoder_layerdrop", "decoder_start_token_id", "dropout", "dropout_rate", "embd_pdrop",
    "encoder_layerdrop", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "init_std",
    "initializer_range", "n_positions", "pad_token_id", "resid_pdrop", "tie_word_embeddings",
}  # fmt: skip
"""Keys of config.json that do not change the computation."""


def check_lm_head_exists(
    config: RunConfig, weight_map: WeightMap, tensors: Arrays, model_name: str
) -> None:
    """Raise CheckpointError if config has an untied LM head, but the Hugging Face model none.

    The config.json of a T5 does not say which.
    """
    if HEAD in tensors or all(weight.name != HEAD for weight in weight_map.weights):
        return
    if config.model.tie_word_embeddings is None:
        return  # `check_weights_match` reports it
    raise CheckpointError(
        f"{format_path(model_name)} has no {HEAD}: if the model's head is its embedding, give "
        f"--{config.model.field_path('tie_word_embeddings')} true"
    )


def check_config_match(config: RunConfig, hf_config: Any, load: str) -> None:
    """Raise CheckpointError if a model's config.json contradicts the configuration.

    Args:
        hf_config: Hugging Face's description of that model, as far as there is one. What it leaves
            out is not compared; shapes are compared with the weights themselves.
    """
    if not isinstance(hf_config, dict):
        return
    family = get_family(config)
    expected, hf_config = (
        family.normalize_config_json(config, given)
        for given in (family.to_config_json(config), hf_config)
    )
    for name in sorted(expected.keys() & hf_config.keys() - _IGNORED_CONFIG_KEYS):
        if hf_config[name] is not None and hf_config[name] != expected[name]:
            raise CheckpointError(
                f"the weights in {format_path(load)} belong to a model with {name} "
                f"{format_name(hf_config[name], 35)}, but the configuration has "
                f"{format_name(expected[name], 35)}: use the configuration they were made with"
            )


def check_weights_match(
    weight_map: WeightMap,
    files: LazyArrays,
    names: Iterable[str],
    load: str,
    names_elsewhere: Collection[str] = (),
) -> None:
    """Raise CheckpointError unless weights in files have the model's names and shapes."""
    from modelling.weights.mxfp4 import mxfp4_fields

    specs = {name: files.spec(name) for name in names}
    mxfp4_names = mxfp4_fields(specs)
    wrong = [
        n for n, spec in specs.items() if spec.dtype.name not in _FLOATS and n not in mxfp4_names
    ]
    if wrong:
        raise CheckpointError(
            f"{wrong[0]} in {load} is {specs[wrong[0]].dtype.name}, but weights are one of "
            f"{', '.join(_FLOATS)}"
        )
    try:
        elsewhere_shapes = {
            w.name: w.shape for w in weight_map.weights if w.name in names_elsewhere
        }
        weight_map.check_shapes(
            elsewhere_shapes | {name: spec.shape for name, spec in specs.items()}
        )
    except ValueError as error:
        raise CheckpointError(f"{load}: {error}") from error


def check_finite(
    config: RunConfig, tensors: Arrays, load: str, names: Iterable[str] | None = None
) -> Arrays:
    """Return lazy tensors that raise CheckpointError on access if they have NaN or infinity.

    Values beyond float16 count as infinity in a float16 model. `checkpoint.allow_nonfinite`
    disables the check.

    Args:
        names: subset of the tensors; None: all.
    """
    is_half = config.model.precision == "float16"

    def check(name: str, array: np.ndarray) -> np.ndarray:
        if config.checkpoint.allow_nonfinite or not array.size:
            return array
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"{name} in {load} has NaN or infinity: take weights of an earlier step, or "
                "accept them by --checkpoint.allow_nonfinite"
            )
        is_weight = not name.startswith(
            (f"{OPTIMIZER_PREFIX}/", f"{FP8_PREFIX}/")
        )  # others are float32
        if is_half and is_weight and max(array.max(), -array.min()) >= _FLOAT16_OVERFLOW:
            raise CheckpointError(
                f"{name} in {load} has values beyond 65504, the maximum of float16: give "
                "--precision bfloat16 or float32"
            )
        return array

    return ArraysView(tensors, names, check)


class DigestCheckedTensors(ArraysView):
    """Lazy tensors whose SHA-256 must not change after the first read, as files can be rewritten.

    Attributes:
        sha256: digests of the tensors that were read, by name.
        digest_error: returns the error for a tensor whose digest has changed.
    """

    def __init__(
        self,
        tensors: Arrays,
        must_match: Collection[str],
        digest_error: Callable[[str], CheckpointError],
        sha256: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap tensors, whose digests are computed or checked as they are read.

        Args:
            must_match: names of the tensors that must not change.
            digest_error: returns the error for a tensor whose digest has changed.
            sha256: digests that are already known.
        """
        self._must_match, self.digest_error = set(must_match), digest_error
        self.sha256 = dict(sha256 or {})
        super().__init__(tensors, None, self._check_digest, in_full=self._must_match)

    def _check_digest(self, name: str, array: np.ndarray) -> np.ndarray:
        if name in self._must_match:
            from checkpoints.safetensors_files import sha256_of_array

            sha256 = sha256_of_array(array)
            if self.sha256.setdefault(name, sha256) != sha256:
                raise self.digest_error(name)
        return array

    def digests(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return the SHA-256 of the named tensors, which must not change from now on."""
        from checkpoints.tensor_files import get_reader_pool

        names_to_read = list(names)
        self._must_match.update(names_to_read)
        with get_reader_pool() as pool:
            for _ in pool.map(self.__getitem__, [n for n in names_to_read if n not in self.sha256]):
                pass
        return {name: self.sha256[name] for name in names_to_read}


def check_digests(
    tensors: Arrays,
    source: str,
    must_match: Collection[str] = (),
    known: Mapping[str, str] | None = None,
) -> DigestCheckedTensors:
    """Return lazy tensors that raise CheckpointError if their files change during start-up.

    Args:
        source: origin of the tensors, for messages.
        must_match: see `DigestCheckedTensors`.
        known: digests from an earlier start.
    """

    def digest_error(name: str) -> CheckpointError:
        return CheckpointError(
            f"{format_name(name)} of {source} has changed while the run started: start again "
            "when nobody writes to these files, which must be the same on all hosts"
        )

    return DigestCheckedTensors(tensors, must_match, digest_error, known)
