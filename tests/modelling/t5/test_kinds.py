"""T5 of 2019, mT5, umT5 and ByT5 against Hugging Face's: training, writing, folders both ways."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from checkpoints import CheckpointError
from config.errors import ConfigError
from config.model import TiedEmbeddingConfig
from config.t5 import T5Config
from files.json_files import JsonObject
from huggingface.model_folders import read_hf_directory, write_hf_directory
from modelling.generation import BeamSearchStrategy, DecodingStrategy, GreedyStrategy
from modelling.t5.config_json import from_config_json, to_config_json
from modelling.weights import WeightsError
from run.resume import resolve_initial_state
from sessions.generation import GenerationSession
from tests.modelling.generation.harness import hf_beams
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.t5.training import (
    ENC,
    PLACES,
    ROWS,
    VOCABULARY,
    batches,
    join_samples,
    our_config,
)
from tests.modelling.torch_training import Reference, check_training, named_by_hf, train
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow

STEPS, RATE, PROMPTS, POSITIONS, END, PAD = 3, 1e-2, 12, 6, 1, 0
KINDS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "2019": (
        transformers.T5Config, transformers.T5ForConditionalGeneration,
        {"feed_forward_proj": "relu"},
    ),
    "v1.1, tied": (  # as transformers 5 saves one made anew: without a head, whatever it is told
        transformers.T5Config, transformers.T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": (
        transformers.MT5Config, transformers.MT5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu"},
    ),
    "mt5, tied": (
        transformers.MT5Config, transformers.MT5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu"},
    ),
    "umt5": (  # as published: its head is neither tied nor scaled
        transformers.UMT5Config, transformers.UMT5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "umt5, scaled": (  # as transformers 5 saves a published one again
        transformers.UMT5Config, transformers.UMT5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu"},
    ),
    "umt5, tied": (
        transformers.UMT5Config, transformers.UMT5ForConditionalGeneration,
        {"feed_forward_proj": "relu", "num_decoder_layers": 1},
    ),
    "byt5": (
        transformers.T5Config, transformers.T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 1},
    ),
    "deep decoder": (  # transformers' cache has as many layers as its encoder, so it cannot write
        transformers.T5Config, transformers.T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
    ),
    "silu": (  # neither: maps without a gate, and a head of its own
        transformers.T5Config, transformers.T5ForConditionalGeneration,
        {"feed_forward_proj": "silu", "tie_word_embeddings": False},
    ),
}  # fmt: skip
TIED = ["2019", "v1.1, tied", "mt5, tied", "umt5, tied"]


def draw(seed: int) -> tuple[tuple[type[Any], type[Any], dict[str, Any]], bool]:
    """Draws a model, and whether its head is the embedding; three seeds in a row have each type."""
    rng = np.random.default_rng([63, seed])
    name = ("T5", "MT5", "UMT5")[seed % 3]
    tied = bool(rng.integers(2))
    heads = int(rng.choice([2, 4, 6]))
    encoder_layers = int(rng.integers(1, 4))
    settings = {
        "d_model": int(rng.choice([16, 24, 32])), "d_kv": int(rng.choice([4, 8, 10])),
        "d_ff": int(rng.choice([20, 48])), "num_heads": heads, "num_layers": encoder_layers,
        "num_decoder_layers": int(rng.integers(1, encoder_layers + 1)),
        "relative_attention_num_buckets": int(rng.choice([4, 8, 32])),
        "relative_attention_max_distance": int(rng.choice([17, 64])),
        "layer_norm_epsilon": float(rng.choice([1e-6, 1e-4])),
        "feed_forward_proj": str(rng.choice(["gated-gelu", "gated-silu", "relu", "silu"])),
        **({} if tied else {"tie_word_embeddings": bool(rng.integers(2))}),
    }  # fmt: skip
    kind = (
        getattr(transformers, f"{name}Config"),
        getattr(transformers, f"{name}ForConditionalGeneration"),
    )
    return (*kind, settings), tied


NUM_DRAWN = 30
DRAWN = {f"drawn {seed}": draw(seed) for seed in range(NUM_DRAWN)}
TIED += [name for name, (_, tied) in DRAWN.items() if tied]
ALL = KINDS | {name: kind for name, (kind, _) in DRAWN.items()}


@cache
def their_model(kind: str, writing: bool = False, layers: int = 2) -> Any:
    """A small random one, whose head is the embedding for the kinds `TIED` alone.

    Args:
        writing: whether other weights say more than the embedding; with those of training, a model
            whose head is the embedding would write the word that it has read.
    """
    described, model_class, settings = ALL[kind]
    ours = our_config().model
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "d_model": ours.hidden_size, "d_kv": ours.attention.d_kv,
        "d_ff": ours.d_ff, "num_layers": layers, "num_heads": ours.attention.heads,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
        "dropout_rate": 0.0, "decoder_start_token_id": PAD,
    }  # fmt: skip
    config = described(**sizes | settings)
    model = model_class(config)
    if described is transformers.UMT5Config and settings.get("tie_word_embeddings") is False:
        model.config.tie_word_embeddings = False  # as older ones read it: it scales no output
    if kind not in TIED:  # these classes tie the head, whatever the configuration says
        model.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(VOCABULARY, config.d_model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (0.3 if writing else 0.1) * torch.randn_like(parameter)
        model.shared.weight *= 0.05 if writing else 1.0
    return model.eval()


def weights_of(model: Any) -> dict[str, np.ndarray]:
    return {n: p.detach().numpy().copy() for n, p in model.named_parameters()}


def config_of(
    kind: str, dp: int = 1, tp: int = 1, micro_batch: int = 4, layers: int = 2, **model: Any
) -> T5Config:
    """Our configuration of the model that a config.json of `their_model` describes."""
    hf_config = their_model(kind, layers=layers).config.to_dict()
    read = from_config_json(JsonObject(hf_config, "config.json"))
    read["embedding"]["tied"] = kind in TIED  # a config.json does not say it
    config = our_config(dp, tp, micro_batch)
    return replace(config, model=T5Config.from_dict(
        config.to_dict() | {"model": config.model.to_dict() | read | model}
    ).model)  # fmt: skip


@cache
def reference(kind: str, layers: int) -> tuple[dict[str, np.ndarray], Reference]:
    """Weights before, and what torch's training gives."""
    model = copy.deepcopy(their_model(kind, layers=layers))
    start = weights_of(model)
    return start, train(model, batches(STEPS), lambda batch: model(**named_by_hf(batch)).loss, RATE)


# ---- training -----------------------------------------------------------------------------------
def check(kind: str, dp: int, tp: int, layers: int = 2) -> None:
    """Loss, every gradient, the tied embedding's too, and the weights after three steps."""
    start, expected = reference(kind, layers)
    model = fine_tuning(config_of(kind, dp, tp, layers=layers), gradients=True)
    model.write(start)
    check_training(model, batches(STEPS), expected, RATE)


@pytest.mark.slow  # by default umT5 has its maps and its tied head, and v1.1 its positions
def test_t5_of_2019_trains_as_hugging_faces() -> None:
    """Of one layer: more are as v1.1's, which examples that share rows train."""
    check("2019", 2, 2, layers=1)


@pytest.mark.parametrize(("kind", "tp"), [slow("byt5", 1), ("umt5, tied", 2)])
def test_a_decoder_of_another_depth_trains_as_hugging_faces(kind: str, tp: int) -> None:
    """umT5's layers have position biases each."""
    check(kind, 1, tp)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_kind_trains_as_hugging_faces(kind: str, dp: int, tp: int) -> None:
    check(kind, dp, tp)


# ---- generation ---------------------------------------------------------------------------------
@cache
def prompts() -> tuple[np.ndarray, np.ndarray]:
    """Words and mask, of many lengths."""
    rng = np.random.default_rng(3)
    mask = (np.arange(ENC) < rng.integers(1, ENC + 1, (PROMPTS, 1))).astype(np.int32)
    return rng.integers(2, VOCABULARY, mask.shape, np.int32) * mask, mask


@cache
def generate_with_hf(kind: str, strategy: DecodingStrategy) -> np.ndarray:
    """Token ids that transformers generates."""
    model, (input_ids, mask) = their_model(kind, writing=True), prompts()
    beams = strategy if isinstance(strategy, BeamSearchStrategy) else BeamSearchStrategy(1)
    rows = [
        hf_beams(model, prompt[:n], POSITIONS, beams.beams, beams.length_penalty, END, PAD)
        for prompt, n in zip(input_ids, mask.sum(1), strict=True)
    ]
    return np.stack(rows)


def generate(kind: str, strategy: DecodingStrategy, dp: int, tp: int, weights: str) -> np.ndarray:
    config = config_of(kind, dp, tp, 4, eval=True, decoder_sequence_length=POSITIONS)
    generation = replace(config.generation, weights=weights, micro_batches=2)
    config = replace(config, generation=generation)
    with GenerationSession(config, strategy) as model:
        model.write(weights_of(their_model(kind, writing=True)))
        return model.generate(*prompts())


def check_tokens(kind: str, strategy: DecodingStrategy, dp: int, tp: int, weights: str) -> None:
    expected = generate_with_hf(kind, strategy)
    assert len({tuple(row) for row in expected}) > PROMPTS / 2
    np.testing.assert_array_equal(generate(kind, strategy, dp, tp, weights), expected)


@pytest.mark.parametrize(
    ("strategy", "tp", "weights"),
    [slow(GreedyStrategy(), 2, "resident"), (BeamSearchStrategy(2), 2, "streamed")],
)
def test_t5_of_2019_writes_as_hugging_faces(
    strategy: DecodingStrategy, tp: int, weights: str
) -> None:
    """The streamed program loads the embedding for the head as well."""
    check_tokens("2019", strategy, 1, tp, weights)


@pytest.mark.parametrize(("kind", "tp", "weights"), [
    slow("byt5", 1, "resident"), ("umt5, scaled", 2, "resident"),
    slow("umt5, scaled", 1, "streamed"),
])  # fmt: skip
def test_a_decoder_of_another_depth_writes_as_hugging_faces(
    kind: str, tp: int, weights: str
) -> None:
    """umT5's layers compute biases of a token's own position."""
    check_tokens(kind, GreedyStrategy(), 1, tp, weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "deep decoder"])
@pytest.mark.parametrize("strategy", [GreedyStrategy(), BeamSearchStrategy(3, 0.7)])
@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_every_kind_writes_as_hugging_faces(
    kind: str, strategy: DecodingStrategy, weights: str, dp: int, tp: int
) -> None:
    check_tokens(kind, strategy, dp, tp, weights)


# ---- folders ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_export_is_loaded_by_transformers_bit_for_bit(kind: str, tmp_path: Path) -> None:
    config, weights = config_of(kind), weights_of(their_model(kind))
    write_hf_directory(tmp_path / "hf", weights, to_config_json(config))
    loaded = ALL[kind][1].from_pretrained(tmp_path / "hf")
    if config.model.architecture == "umt5":  # whose config.json transformers 5 does not obey
        loaded.config.tie_word_embeddings = to_config_json(config)["tie_word_embeddings"]
    for name, value in their_model(kind).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    input_ids, mask = map(torch.tensor, prompts())
    inputs = {
        "input_ids": input_ids.long(),
        "attention_mask": mask,
        "decoder_input_ids": input_ids.long(),
    }
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, their_model(kind)(**inputs).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_transformers_is_read_bit_for_bit(kind: str, tmp_path: Path) -> None:
    their_model(kind).save_pretrained(tmp_path)
    hf_config = json.loads((tmp_path / "config.json").read_text())
    read = from_config_json(JsonObject(hf_config, "config.json"))
    model = config_of(kind).to_dict()["model"]
    assert {n: model[n] for n in read if n not in ("embedding", "attention")} == {
        n: x for n, x in read.items() if n not in ("embedding", "attention")
    }
    weights = base_weight_map(config_of(kind)).from_hf(read_hf_directory(tmp_path))
    expected = weights_of(their_model(kind))
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[n], x) for n, x in expected.items())


# ---- random models ------------------------------------------------------------------------------
def train_as_drawn(kind: str, rng: np.random.Generator) -> None:
    """In any layout, with one or several examples a row."""
    dp, tp = [(1, 1), (2, 1), (1, 2), (2, 2)][rng.integers(4)]
    packed = bool(rng.integers(2))
    config = config_of(kind, dp, tp).to_dict()
    config["execution"] |= {
        "micro_batch_size": 3 if packed else 4,
        "attention_serialisation": int(rng.choice([1, 2])),
        "activations": str(rng.choice(["keep", "recompute"])),
    }
    given = batches(STEPS)
    if packed:
        config["training"]["global_batch_size"] = ROWS
        config["data"]["examples_per_sample"] = PLACES
        given = [join_samples(batch) for batch in given]
    start, expected = reference(kind, 2)
    ours = transposed(T5Config.from_dict(config), bool(rng.integers(2)))
    model = fine_tuning(ours, gradients=True)
    model.write(start)
    check_training(model, given, expected, RATE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_DRAWN))
def test_thirty_drawn_models_are_hugging_faces(seed: int, tmp_path: Path) -> None:
    kind, rng = f"drawn {seed}", np.random.default_rng([64, seed])
    train_as_drawn(kind, rng)
    strategy = (GreedyStrategy(), BeamSearchStrategy(3, 0.7))[rng.integers(2)]
    weights = ("resident", "streamed")[rng.integers(2)]
    check_tokens(kind, strategy, 1, int(rng.choice([1, 2])), weights)
    test_export_is_loaded_by_transformers_bit_for_bit(kind, tmp_path / "ours")
    test_a_folder_of_transformers_is_read_bit_for_bit(kind, tmp_path / "theirs")


PUBLISHED = {
    # what the hub's files say of feed-forward layers and head
    "t5-small": ({"model_type": "t5"}, (False, "relu", True, True)),
    "google/t5-v1_1-small": (
        {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        (True, "gelu_tanh", False, False),
    ),
    "google/mt5-small": (
        {"model_type": "mt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        (True, "gelu_tanh", False, False),
    ),
    "google/umt5-small": (
        {
            "model_type": "umt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
            "is_gated_act": True, "dense_act_fn": "gelu_new", "scalable_attention": True,
        },
        (True, "gelu_tanh", False, False),
    ),
    "google/umt5-small, saved again": (
        {"model_type": "umt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": True},
        (True, "gelu_tanh", True, False),
    ),
    "FLAN-T5, saved again": (
        {
            "model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": True,
            "scale_decoder_outputs": False, "is_gated_act": True, "dense_act_fn": "gelu_new",
        },
        (True, "gelu_tanh", False, False),
    ),
}  # fmt: skip
SIZES = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_say_which_kind_they_are(name: str) -> None:
    said, expected = PUBLISHED[name]
    found = from_config_json(
        JsonObject(SIZES | {"decoder_start_token_id": 0} | said, "config.json")
    )
    kind = (
        found["is_gated_act"],
        found["activation"],
        found["scale_decoder_outputs"],
        found["embedding"]["tied"],
    )
    assert kind == expected
    assert found["architecture"] == said["model_type"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"feed_forward_proj": "gelu"}, "feed_forward_proj 'gelu'"),
        ({"feed_forward_proj": []}, "feed_forward_proj []"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn 'gelu'"),
        ({"scale_decoder_outputs": "yes"}, "scale_decoder_outputs 'yes'"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder False"),
        ({"is_gated_act": True}, "is_gated_act True"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_config_json(JsonObject(SIZES | change, "config.json"))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_mt5_without_a_head_is_taken_for_a_tied_one_if_that_is_said(tmp_path: Path) -> None:
    their_model("mt5, tied").save_pretrained(tmp_path)
    config = config_of("mt5, tied")
    checkpoint = replace(config.checkpoint, load=str(tmp_path))
    config = replace(config, checkpoint=checkpoint)
    start = resolve_initial_state(config, base_weight_map(config))
    expected = weights_of(their_model("mt5, tied"))
    assert start.tensors.keys() == expected.keys()
    assert all(np.array_equal(start.tensors[n], x) for n, x in expected.items())
    untied = replace(config, model=replace(config.model, embedding=TiedEmbeddingConfig(VOCABULARY)))
    with pytest.raises(CheckpointError, match=r"no lm_head.weight: .* --model.embedding.tied true"):
        resolve_initial_state(untied, base_weight_map(untied))


def test_a_head_that_is_no_copy_of_the_embedding_is_refused() -> None:
    """Files of 2019 have the embedding under up to four names."""
    weight_map, weights = base_weight_map(config_of("2019")), weights_of(their_model("2019"))
    copy = weights | {"lm_head.weight": weights["shared.weight"].copy()}
    np.testing.assert_array_equal(
        weight_map.from_hf(copy)["shared.weight"], weights["shared.weight"]
    )
    copy["lm_head.weight"][3, 2] += 1
    with pytest.raises(WeightsError, match=r"'shared.weight' and 'lm_head.weight' differ"):
        weight_map.from_hf(copy)["shared.weight"]
