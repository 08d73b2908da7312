"""The presets `small` and `base` at their real size against Hugging Face's T5 in float32.

Random weights, short sequences, a small batch. Only one side trains at a time; `base` takes 14 GB.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
import transformers

from config.presets import load_config
from config.t5 import T5Config
from tests.modelling.sessions import fine_tuning, inference
from tests.modelling.t5.hf import hf_model
from tests.modelling.torch_training import Reference, logical, named_by_hf, train, worst

SAMPLES, ENC, DEC, STEPS, RATE = 4, 16, 6, 5, 1e-4
Arrays = dict[str, np.ndarray]


def config_of(preset: str, dp: int = 1, tp: int = 1) -> T5Config:
    """A preset with a small batch, on CPU."""
    optimizer = {"eps": 1e-6, "weight_decay": 0.1, "gradient_clipping": 1.0}
    overrides = {
        "model": {"sequence_length": ENC, "decoder_sequence_length": DEC},
        "training": {"global_batch_size": SAMPLES, "optimizer": optimizer},
        "execution": {
            "micro_batch_size": SAMPLES // (2 * dp),
            "data_parallel": dp,
            "tensor_parallel": tp,
            "device": "cpu",
        },
    }
    return load_config(T5Config, "finetuning", preset, overrides)


def their_model(preset: str) -> transformers.T5ForConditionalGeneration:
    """Hugging Face's model, the same each time, with logits of variance 1.

    Larger weights, or a larger learning rate, make training so sensitive that torch in float32 and
    in float64 differ by 1e-3 after 5 steps.
    """
    model = hf_model(config_of(preset), spread=0.005)
    with torch.no_grad():
        model.lm_head.weight /= model.config.d_model**0.5
    return model


def batches(preset: str) -> list[Arrays]:
    """Global batches with sequences and targets of different lengths."""
    rng = np.random.default_rng(0)
    vocabulary = config_of(preset).model.embedding.vocab_size
    found = []
    for _ in range(STEPS):
        mask = (np.arange(ENC) < rng.integers(4, ENC + 1, (SAMPLES, 1))).astype(np.int32)
        input_ids = rng.integers(2, vocabulary, (SAMPLES, ENC), np.int32) * mask
        labels = rng.integers(2, vocabulary, (SAMPLES, DEC), np.int32)
        labels[np.arange(DEC) >= rng.integers(2, DEC + 1, (SAMPLES, 1))] = -100
        before = np.concatenate([np.zeros((SAMPLES, 1), np.int32), labels[:, :-1]], axis=1)
        inputs = np.where(before == -100, 0, before)
        found.append({"input_ids": input_ids, "segment_ids": mask, "decoder_input_ids": inputs,
                      "labels": labels})  # fmt: skip
    return found


@dataclass(frozen=True)
class Expected:
    """Results of Hugging Face's model, and its initial weights."""

    start: Arrays
    trained: Reference
    tokens: np.ndarray


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """Of a preset. Arrays are in files, so that memory is free for our side."""

    @cache
    def of(preset: str) -> Expected:
        def on_disk_entries(kind: str, arrays: Arrays) -> Arrays:
            folder = tmp_path_factory.mktemp(f"{preset}-{kind}")
            for name, array in arrays.items():
                np.save(folder / f"{name}.npy", array)
            return {n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in arrays}

        model, data = their_model(preset), batches(preset)
        start, tokens = on_disk_entries("start", logical(model)), greedy(model, data[0])
        trained = train(model, data, lambda batch: model(**named_by_hf(batch)).loss, RATE)
        gradients = on_disk_entries("gradients", trained.gradients)
        weights = on_disk_entries("weights", trained.weights)
        return Expected(start, replace(trained, gradients=gradients, weights=weights), tokens)

    return of


def greedy(model: transformers.T5ForConditionalGeneration, batch: Arrays) -> np.ndarray:
    """Generated tokens, (SAMPLES, DEC)."""
    # Their generation would scale the decoder's output, as for a head tied to the embedding.
    model.config.tie_word_embeddings = False
    generated = model.generate(
        input_ids=torch.tensor(batch["input_ids"]).long(),
        attention_mask=torch.tensor(batch["segment_ids"]),
        do_sample=False,
        num_beams=1,
        max_new_tokens=DEC,
    )
    tokens = np.zeros((SAMPLES, DEC), np.int64)
    tokens[:, : generated.shape[1] - 1] = generated[:, 1:].numpy()
    return tokens


LAYOUTS = [(preset, dp, tp) for preset in ("small", "base") for dp, tp in ((1, 1), (2, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "dp", "tp"), LAYOUTS)
def test_as_hugging_face(
    preset: str, dp: int, tp: int, expected: Callable[[str], Expected]
) -> None:
    """Loss, all gradients, 5 steps of AdamW, greedy tokens. A minute for `small`, 3 for `base`."""
    their = expected(preset)
    found = generated(preset, dp, tp, their.start)
    np.testing.assert_array_equal(found, their.tokens)
    assert len(np.unique(found)) > DEC

    model = fine_tuning(config_of(preset, dp, tp), gradients=True)
    model.session.weights_to_host_on_exit = False
    model.write(their.start)
    first, *others = batches(preset)
    with model:
        results = model.run([first], [RATE], 0)
        gradients = worst(model.gradients(), their.trained.gradients)
        for step, batch in enumerate(others, 1):
            results += model.run([batch], [RATE], step)
        weights = worst(model.read(optimizer=False), their.trained.weights)
    losses = np.array([r.loss for r in results]) / their.trained.losses - 1
    norms = np.array([r.grad_norm for r in results]) / their.trained.norms - 1
    print(f"{preset} {dp}x{tp}: relative errors: losses {np.abs(losses).max():.1e}, "
          f"norms {np.abs(norms).max():.1e}, gradients {gradients[0]:.1e} ({gradients[1]}), "
          f"weights {weights[0]:.1e} ({weights[1]})")  # fmt: skip
    assert np.abs(losses).max() < 1e-5
    assert np.abs(norms).max() < 1e-4
    assert gradients[0] < 1e-4, gradients[1]
    assert weights[0] < 1e-4, weights[1]


def generated(preset: str, dp: int, tp: int, weights: Arrays) -> np.ndarray:
    batch = batches(preset)[0]
    model = inference(config_of(preset, dp, tp))
    with model:
        model.write(weights)
        tokens = model.generate(batch["input_ids"], batch["segment_ids"])
    del model
    gc.collect()
    return tokens
