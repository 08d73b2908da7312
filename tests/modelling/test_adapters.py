"""Adapters against `peft` on Hugging Face's models in torch: loss, every gradient, AdamW."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch

from config.errors import ConfigError
from config.sections import RunConfig
from modelling.model_family import get_family
from modelling.weights import WeightMap
from modelling.weights.lora import init_adapters, merge_adapters
from modelling.weights.weight_mapping import is_trainable
from tests.modelling.encoder_decoders import KINDS as ENCODER_DECODERS
from tests.modelling.encoder_decoders import without_images
from tests.modelling.gptj import hf as gptj_hf
from tests.modelling.gptj import training as gptj_training
from tests.modelling.llama import hf as llama_hf
from tests.modelling.llama import training as llama_training
from tests.modelling.peft_reference import named, renamed, tie_adapters, with_peft
from tests.modelling.rounding import fake_quantize_weight, is_quantized
from tests.modelling.sessions import fine_tuning
from tests.modelling.t5 import training as t5_training
from tests.modelling.torch_training import Reference, check_training, logical, named_by_hf, train
from tests.slow import one_of_many, slow

pytestmark = pytest.mark.usefixtures("cached")  # many of the programs are alike

STEPS, RATE = 3, 2e-3
Batches = list[dict[str, np.ndarray]]


class Case(NamedTuple):
    """A small model of ours and theirs, and what both are trained on."""

    config: Callable[..., RunConfig]
    """For data and tensor parallelism and the micro-batch."""

    model: Callable[[], torch.nn.Module]
    batches: Batches
    loss: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def loss_of_tokens(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if "segment_ids" in batch:
        return llama_training.loss_of_texts(model, batch)
    logits = model(input_ids=batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


FEWER_LAYERS = {
    "shallow gpt_oss": llama_hf.hf_config("gpt_oss", num_hidden_layers=1),
    "shallow mixtral": llama_hf.hf_config("mixtral", num_hidden_layers=1),
    "shallow mistral": llama_hf.hf_config("mistral", num_hidden_layers=2),
}


def case(kind: str) -> Case:
    if kind == "t5":
        of = partial(t5_training.our_config, layers=1)
        given, loss = t5_training.batches(STEPS), lambda m, b: m(**named_by_hf(b)).loss
        return Case(of, lambda: t5_training.their_model(1), given, loss)
    if kind in ENCODER_DECODERS:
        found = ENCODER_DECODERS[kind]
        given, loss = found.batches(STEPS), lambda m, b: m(**named_by_hf(b)).loss
        return Case(found.config, found.model, given, loss)
    if kind == "gptj":
        of = gptj_hf.small_config
        given = gptj_training.batches(STEPS)
        return Case(of, lambda: gptj_hf.hf_model(of()), given, loss_of_tokens)
    theirs = FEWER_LAYERS.get(kind) or llama_hf.hf_config(kind)
    given = llama_training.batches(STEPS)
    if kind not in ("qwen3", "phi3"):  # whose angles depend on lengths
        given = [llama_training.several_texts(5), *given[1:]]
    return Case(
        lambda *split: llama_hf.our_config(theirs, *split),
        lambda: llama_hf.hf_model(theirs),
        given,
        loss_of_tokens,
    )


def trained(kind: str, **settings: Any) -> tuple[dict[str, np.ndarray], Reference]:
    return _trained(kind, json.dumps(settings))


@cache
def _trained(kind: str, settings: str) -> tuple[dict[str, np.ndarray], Reference]:
    """Weights before, and what training gives, in float64."""
    of, given = case(kind), json.loads(settings)
    tied = given.pop("tied", False)
    lora, dtype = {}, torch.float64
    if kind in ENCODER_DECODERS:
        lora, dtype = dict(ENCODER_DECODERS[kind].lora), ENCODER_DECODERS[kind].dtype
    model = with_peft(of.model(), **given, **lora)
    if tied:
        tie_adapters(model)
    start = without_images(named(logical(model)))
    model.to(dtype)
    found = renamed(train(model, of.batches, lambda b: of.loss(model, b), RATE))
    return start, replace(found, weights=without_images(found.weights))


# ---- every kind of model -------------------------------------------------------------------------
def check(kind: str, split: Sequence[int], ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Train both with these settings of adapters."""
    of = case(kind)
    start, expected = trained(kind, **theirs)
    fields = {name if "." in name else f"adapter.{name}": value for name, value in ours.items()}
    config = of.config(*split).with_values(fields)
    weight_map = get_family(config).weight_map(config)
    model = fine_tuning(config, gradients=True)
    model.write(weight_map.from_hf(start))
    check_training(model, of.batches, expected, RATE, partial(for_files, weight_map))


def for_files(weight_map: WeightMap, ours: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Under the names that files have, of T5's embedding those of the first module that uses it;
    without BART's buffer, which is no parameter."""
    named = dict(weight_map.to_hf(ours))
    named.pop("final_logits_bias", None)
    return {n.replace("shared.lora", "encoder.embed_tokens.lora"): named[n] for n in named}


ALL_LINEAR = {"adapter.rank": 4, "adapter.alpha": 6.0, "adapter.targets": "all-linear"}


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("t5", (1, 1, 4)),
        ("phi3", (2, 2, 2)),
        *(
            slow(kind, split)
            for kind, split in (
                *(("t5", (2, 2, 2)), ("t5", (1, 2, 4)), ("gptj", (2, 1, 4)), ("gptj", (2, 2, 2))),
                *(("qwen3", (1, 2, 2)), ("llama", (1, 4, 2))),
                *(("phi3", (1, 1, 4)), ("gemma3_text", (1, 1, 4)), ("gemma3_text", (2, 2, 2))),
                ("gpt_oss", (1, 2, 4)),
            )
        ),
        *(
            one_of_many(kind, split)
            for split in ((1, 1, 8), (2, 2, 4))
            for kind in ENCODER_DECODERS
        ),
    ],
)
def test_loss_every_gradient_and_three_steps_of_adamw(kind: str, split: tuple[int, ...]) -> None:
    """Of all linear layers, in fused products an adapter for each map that PEFT knows."""
    check(kind, split, ALL_LINEAR, {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"})


@pytest.mark.parametrize(
    ("kind", "split", "groups"),
    [slow("shallow gpt_oss", (1, 2, 2), 2), slow("gpt_oss", (2, 1, 2), 6)],
)
def test_beside_experts_that_pass_in_groups(kind: str, split: tuple[int, ...], groups: int) -> None:
    """Frozen, they have no gradients; what they hand back has. Below, some have adapters."""
    targets = ["q_proj", "v_proj", "o_proj"]
    ours = {"rank": 4, "alpha": 6.0, "targets": ",".join(targets)}
    ours |= {"execution.expert_groups": groups, "execution.activations": "recompute"}
    check(kind, split, ours, {"r": 4, "lora_alpha": 6, "target_modules": targets})


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
FIRST_DOWN = "layers.0.mlp.experts.down_proj"


@pytest.mark.filterwarnings("ignore:The following rank_pattern")  # which PEFT uses all the same
@pytest.mark.parametrize(
    ("kind", "split", "names", "execution"),
    [
        ("shallow gpt_oss", (1, 2, 2), [GATE_UP, DOWN], {"expert_groups": 2}),
        slow("shallow mixtral", (1, 2, 4), [DOWN, GATE_UP], {}),
        slow("gpt_oss", (1, 2, 2), [GATE_UP], {"expert_parallel": True}),
        slow("qwen3_moe", (2, 2, 2), [GATE_UP, DOWN], {"expert_parallel": True}),
        slow("qwen3_moe", (1, 1, 4), [FIRST_DOWN, GATE_UP], {"expert_groups": 4}),
        slow("olmoe", (1, 1, 4), [DOWN], {"activations": "keep"}),
        slow("qwen2_moe", (2, 1, 2), [FIRST_DOWN], {}),
    ],
)
def test_adapters_of_experts(
    kind: str, split: tuple[int, ...], names: list[str], execution: dict[str, Any]
) -> None:
    ranks = {"experts.down_proj": 3}
    given = {"r": 4, "lora_alpha": 6, "rank_pattern": ranks, "target_modules": ["q_proj"]}
    given = {**given, "target_parameters": names}
    of, (start, found) = case(kind), trained(kind, **given)
    fields = {"rank": 4, "alpha": 6.0, "targets": "q_proj", "target_parameters": ",".join(names)}
    fields = {f"adapter.{n}": x for n, x in fields.items()}
    fields |= {"adapter.rank_pattern": "experts.down_proj=3"} if names != [GATE_UP] else {}
    config = of.config(*split).with_values(
        fields | {f"execution.{n}": x for n, x in execution.items()}
    )
    weight_map = get_family(config).weight_map(config)
    gradients = dict(weight_map.filter_mappings(is_trainable).from_hf(found.gradients))
    weights = dict(weight_map.from_hf(found.weights))
    expected = Reference(found.losses, found.norms, gradients, weights, found.state)
    model = fine_tuning(config, gradients=True)
    model.write(weight_map.from_hf(start))
    check_training(model, of.batches, expected, RATE)


# ---- settings -----------------------------------------------------------------------------------
NORMS = [f"0.{name}_layernorm" for name in ("input", "post_attention")]
TRAINED_BESIDES = {
    "training.trainable": "*norm*,lm_head.weight",
    "training.frozen": "layer.1",
}
OF_SOME_LAYERS = r".*layers\.(1.*\.q_proj|[01].*\.up_proj)"
QUERIES_ALONE = r".*layers\.\d+\.self_attn\.q_proj"
SETTINGS: list[Any] = [
    slow({"rank": 4}, {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    slow(
        {"rank": 4, "alpha": 2.0, "rslora": True, "targets": QUERIES_ALONE},
        {"r": 4, "lora_alpha": 2, "use_rslora": True, "target_modules": QUERIES_ALONE},
    ),
    (
        {
            "rank": 3,
            "alpha": 2.0,
            "rslora": True,
            "targets": OF_SOME_LAYERS,
            "rank_pattern": "1.mlp.up_proj=2",
            **TRAINED_BESIDES,
        },
        {
            "r": 3,
            "lora_alpha": 2,
            "use_rslora": True,
            "target_modules": OF_SOME_LAYERS,
            "rank_pattern": {"1.mlp.up_proj": 2},
            "modules_to_save": [*NORMS, "model.norm", "lm_head"],
        },
    ),
    (
        {
            "rank": 4,
            "targets": "k_proj,v_proj,o_proj,up_proj",
            "rank_pattern": "k_proj=2,.*self_attn.o_proj=3",
            "alpha_pattern": "v_proj=5,up_proj=0.5",
            "modules_to_save": "lm_head,norm",
        },
        {
            "r": 4,
            "target_modules": ["k_proj", "v_proj", "o_proj", "up_proj"],
            "rank_pattern": {"k_proj": 2, ".*self_attn.o_proj": 3},
            "alpha_pattern": {"v_proj": 5, "up_proj": 0.5},
            "modules_to_save": ["lm_head", "norm"],
        },
    ),
    slow(
        {"rank": 3, **TRAINED_BESIDES},
        {"r": 3, "modules_to_save": [*NORMS, "model.norm", "lm_head"]},
    ),
]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    SETTINGS,
    ids=["default", "expression", "some layers", "patterns", "trained besides"],
)
def test_settings_mean_what_they_do_in_peft(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    check("shallow mistral", (1, 1, 4), ours, theirs)


@pytest.mark.parametrize(
    ("kind", "split", "targets"),
    [
        ("llama", (1, 4, 2), "q_proj,k_proj,v_proj,down_proj"),  # with biases; fewer keys
        slow("llama", (2, 2, 2), "all-linear"),
        slow("phi3", (1, 2, 4), "all-linear"),
        slow("t5", (2, 1, 4), "all-linear"),
    ],
)
def test_dora(kind: str, split: tuple[int, ...], targets: str) -> None:
    """Norms of the rows of all of a weight, a part of which is on each device."""
    theirs = targets if targets == "all-linear" else targets.split(",")
    ours = {"rank": 3, "dora": True, "targets": targets}
    check(kind, split, ours, {"r": 3, "use_dora": True, "target_modules": theirs})


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")  # of every T5, says PEFT
@pytest.mark.parametrize(
    ("kind", "split"),
    [slow("mistral", (1, 2, 4)), slow("t5", (1, 1, 4)), slow("gptj", (2, 2, 2))],
)
def test_an_adapter_of_the_head(kind: str, split: tuple[int, ...]) -> None:
    """Below, one of the embedding and of the head is trained by default."""
    targets = [*(["q"] if kind == "t5" else ["q_proj"]), "lm_head"]
    ours = {"rank": 4, "alpha": 6.0, "targets": ",".join(targets), "rank_pattern": "lm_head=3"}
    theirs = {"r": 4, "lora_alpha": 6, "rank_pattern": {"lm_head": 3}, "target_modules": targets}
    check(kind, split, ours, theirs)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    ("kind", "split", "targets", "theirs"),
    [
        ("mistral", (1, 2, 4), "embed_tokens,lm_head", {}),
        slow("mistral", (1, 2, 4), "q_proj,embed_tokens", {}),
        # whose head is the embedding; with the blocks of the next test
        ("llama", (1, 4, 2), "q_proj,v_proj,embed_tokens", {"tied": True}),
        slow("mistral", (2, 1, 4), "embed_tokens,lm_head", {}),
        slow("gemma3_text", (2, 2, 2), "q_proj,lm_head", {"tied": True}),  # it is scaled
        slow("gptj", (1, 2, 4), "q_proj,wte", {}),
        slow("t5", (2, 2, 2), "q,shared", {"tied": True}),
    ],
)
def test_an_adapter_of_the_embedding(
    kind: str, split: tuple[int, ...], targets: str, theirs: dict[str, Any]
) -> None:
    """Of a tied one PEFT has one for each module: here they are one."""
    names = targets.replace("shared", "embed_tokens").split(",")
    names += ["embed_tokens", "lm_head"] if theirs and kind != "t5" else []
    more = {"r": 4, "lora_alpha": 6, "target_modules": names}
    check(kind, split, {"rank": 4, "alpha": 6.0, "targets": targets}, theirs | more)


ENDS = ["embed_tokens", "lm_head"]
BOTH_ENDS = {"model.embed_tokens": [9, 3, 40], "lm_head": [9, 3, 40]}


@pytest.mark.parametrize(
    ("kind", "split", "tokens"),
    [
        ("llama", (1, 4, 2), [9, 3, 40]),  # whose head is the embedding
        slow("mistral", (2, 2, 2), BOTH_ENDS),
        slow("mistral", (1, 2, 4), [9, 3, 40]),
        slow("gemma3_text", (1, 1, 4), [9, 3, 40]),  # whose embedding is scaled
    ],
)
def test_rows_of_tokens_are_trained_beside_a_frozen_embedding(
    kind: str, split: tuple[int, ...], tokens: Any
) -> None:
    """Each device of a tensor-parallel group has a part of the vocabulary."""
    ours = {"rank": 4, "alpha": 6.0, "trainable_tokens": "9,3,40"}
    ours["trainable_tokens_head"] = isinstance(tokens, dict)
    theirs = {"r": 4, "lora_alpha": 6, "trainable_token_indices": tokens}
    check(kind, split, ours, theirs)


QUANTISED = {"model.quantization": "int4", "model.quantization_group_size": 4}


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (
            {"targets": "qkv_proj"},
            "qkv_proj matches what is no linear layer and no embedding: these are embed_tokens, q_",
        ),
        ({"targets": "q_proj,lm_head", "dropout": 0.1}, "adapter.dropout is for linear layers in"),
        ({"targets": "lm_head", "dora": True}, "adapter.dora is for linear layers in blocks, but"),
        (
            {"targets": "embed_tokens", "dora": True},
            "but adapter.targets matches model.embed_tokens",
        ),
        (
            {"targets": "embed_tokens", "trainable_tokens": "3"},
            "some rows of model.embed_tokens.weight, which has an adapter: leave one",
        ),
        (
            {"targets": "lm_head", "model.new_rows": "3"},
            "lm_head, which has rows for new tokens: give --adapter.modules_to_save lm_head",
        ),
        (
            {"target_parameters": GATE_UP},
            "target_parameters: mlp.experts.gate_up_proj matches no mod",
        ),
        ({"targets": ".*norm.*|.*q_proj"}, "matches .*input_layernorm, which is no linear layer"),
        (
            {"modules_to_save": "mlp", "quantised": True},
            ".*gate_proj.* is trainable, but model.quantization quantizes",
        ),
        ({"training.trainable": "layer.1"}, "matches .*q_proj.weight, which has an adapter"),
        ({"training.frozen": "*norm*"}, "training.frozen takes from training.trainable where"),
        ({"training.trainable": "*lora_B*"}, "matches no weight"),
        (
            {"modules_to_save": "up_proj"},
            "matches some of .*gate_proj.*, .*up_proj.*, which are one",
        ),
        (
            {"targets": "q_proj,v_projj"},
            "adapter.targets: v_projj matches no module; did you mean v_proj",
        ),
        ({"modules_to_save": "lm_head,normm"}, "modules_to_save: normm matches no module; did you"),
        ({"rank_pattern": "q_proj=2,k_proj=3"}, "rank_pattern: k_proj matches no module"),
        (
            {"alpha_pattern": "v_porj=3"},
            "alpha_pattern: v_porj matches no module; did you mean v_p",
        ),
    ],
)
def test_what_adapters_cannot_be_of(adapter: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"rank": 4, **adapter}
    more = QUANTISED if fields.pop("quantised", False) else {}
    named = {n if "." in n else f"adapter.{n}": x for n, x in fields.items()}
    plain = case("mistral").config()
    with pytest.raises(ConfigError, match=said):
        get_family(plain).weight_map(plain.with_values(named | more))


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (
            {"target_parameters": DOWN, "dropout": 0.1},
            "adapter.dropout is for linear layers in blocks",
        ),
        (
            {"target_parameters": DOWN, "dora": True},
            "dora .* adapter.target_parameters matches experts",
        ),
        (
            {"target_parameters": f"{DOWN},mlp.experts.gate_proj"},
            "gate_proj matches no module; there are: gate_up_proj",
        ),
        ({"targets": "gate_proj"}, "matches experts: model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_what_adapters_of_experts_cannot_be(adapter: dict[str, Any], said: str) -> None:
    fields = {f"adapter.{name}": value for name, value in {"rank": 4, **adapter}.items()}
    config = case("shallow mixtral").config().with_values(fields)
    with pytest.raises(ConfigError, match=said):
        get_family(config).weight_map(config)


# ---- merged -------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")  # as ours
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", ["t5", "gptj", "phi3"])
def test_merged_weights_are_those_of_peft(kind: str, dora: bool) -> None:
    of, odd = case(kind), {"t5": "wo", "gptj": "fc_in", "phi3": "down_proj"}[kind]
    more: dict[str, Any] = {"target_modules": "all-linear", "use_dora": dora, "use_rslora": True}
    model = with_peft(of.model(), r=4, alpha_pattern={odd: 3}, **more)
    ours = {"rank": 4, "targets": "all-linear", "dora": dora, "rslora": True}
    ours |= {"alpha_pattern": f"{odd}=3"}
    config = of.config().with_values({f"adapter.{name}": value for name, value in ours.items()})
    weight_map = get_family(config).weight_map(config)
    found = weight_map.without_adapters.to_hf(
        merge_adapters(weight_map, weight_map.from_hf(named(logical(model))), np.dtype("float32"))
    )
    expected = logical(model.merge_and_unload())
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_adapters_are_merged_into_what_few_bits_left() -> None:
    """Of linear layers, with an adapter or without; else into the weights."""
    config = case("mistral").config().with_values({**QUANTISED, "adapter.rank": 4})
    weight_map, weights = get_family(config).weight_map(config), random_weights(config)
    quantised = {n for n, w in weights.items() if "lora_" not in n and is_quantized(n, w)}
    kept = {n: fake_quantize_weight(w, 4, 4) if n in quantised else w for n, w in weights.items()}
    float32 = np.dtype("float32")
    expected, plain = (
        merge_adapters(weight_map, kept, float32),
        merge_adapters(weight_map, weights, float32),
    )
    found = merge_adapters(weight_map, weights, float32, config.model.quant)
    for name in weight_map.without_adapters.init_weights(0):
        np.testing.assert_array_equal(found[name], expected[name])
        assert (found[name] != plain[name]).any() == (name in quantised), name


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"adapter.dora": True}, {"use_dora": True}),
        ({"adapter.targets": "embed_tokens,lm_head"}, {"target_modules": ENDS}),
    ],
)
def test_new_adapters_begin_as_those_of_peft(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """New adapters change nothing, and A has PEFT's distribution."""
    of = case("mistral")
    model = peft.get_peft_model(of.model(), peft.LoraConfig(r=200, **theirs))
    config = of.config().with_values({"adapter.rank": 200, **ours})
    weight_map = get_family(config).weight_map(config)
    theirs = weight_map.from_hf(named(logical(model)))
    found = init_adapters(weight_map, theirs, seed=3)
    assert found.keys() == theirs.keys() - {w.name for w in weight_map.without_adapters.weights}
    for name, array in found.items():
        if name.endswith("lora_A.weight"):
            limit = array.shape[1] ** -0.5
            for drawn in (array, theirs[name]):
                assert 0.98 * limit < np.abs(drawn).max() <= limit
                assert abs(np.abs(drawn).mean() / limit - 0.5) < 0.02
        elif name.endswith("lora_embedding_B"):
            for drawn in (array, theirs[name]):
                assert abs(drawn.std() - 1) < 0.05
                assert abs((drawn**4).mean() - 3) < 0.4
        else:
            np.testing.assert_allclose(array, theirs[name], rtol=1e-6, err_msg=name)


# ---- dropout, and 16 bits -----------------------------------------------------------------------
def random_weights(config: RunConfig) -> dict[str, np.ndarray]:
    """With a B that is not zero."""
    weights = dict(get_family(config).weight_map(config).init_weights(0))
    rng = np.random.default_rng(0)
    for name in weights:
        if name.endswith("lora_B.weight"):
            weights[name] = 0.3 * rng.standard_normal(weights[name].shape, np.float32)
    return weights


def losses(config: RunConfig) -> list[float]:
    """Of a model with random weights, whose adapters matter: of a step, and two of one batch at a
    rate of 0, whose losses differ if there is dropout."""
    model = fine_tuning(config)
    model.write(random_weights(config))
    first, last, _ = case("mistral").batches
    given = [(first, 1e-2), (last, 0.0), (last, 0.0)]
    with model:
        return [model.run([b], [rate], i)[0].loss for i, (b, rate) in enumerate(given)]


def dropping(split: Sequence[int], **fields: Any) -> RunConfig:
    """Adapters of maps whose inputs are whole on each device of a tensor-parallel group."""
    adapter = {"rank": 4, "dropout": 0.4, "targets": "q_proj,v_proj,up_proj"}
    config = case("mistral").config(*split)
    return config.with_values({f"adapter.{n}": x for n, x in adapter.items()} | fields)


KEPT = {"execution.activations": "keep"}


def test_dropout_is_the_same_on_a_group_and_when_computed_again() -> None:
    found = losses(dropping((1, 1, 8)))
    np.testing.assert_allclose(losses(dropping((1, 2, 8), **KEPT)), found, rtol=1e-5)
    assert abs(found[1] - found[2]) > 1e-3


@pytest.mark.slow  # to the bit what the one above shows
def test_dropout_that_is_computed_again_changes_no_bit() -> None:
    assert losses(dropping((1, 1, 8), **KEPT)) == losses(dropping((1, 1, 8)))


def test_adapters_are_float32_beside_weights_of_16_bits() -> None:
    """Their updates are as small as they are; the base's bits stay."""
    of = case("mistral")
    ours = {"adapter.rank": 4, "model.precision": "bfloat16", "execution.master_weights": True}
    config = of.config().with_values(ours)
    model = fine_tuning(config)
    model.write(random_weights(config))
    with model:
        before = model.read()
        model.run([of.batches[0]], [1e-7], 0)
        model.run([of.batches[0]], [1e-7], 1)
        after = model.read()
    for name, array in before.items():
        adapter = "lora_" in name and "/" not in name
        assert array.dtype == (np.float32 if adapter or "/" in name else "bfloat16"), name
        assert (array.tobytes() == after[name].tobytes()) != ("lora_" in name), name
        if adapter:
            assert 0 < np.abs(after[name] - array).max() < 3e-7
    assert not [name for name in after if "master" in name]


# ---- a base in few bits -------------------------------------------------------------------------
MORE_BITS = [((1, 1, 4), 4), ((1, 1, 4), 8), ((2, 2, 2), 8)]


@pytest.mark.parametrize(
    ("kind", "split", "bits"),
    [
        ("phi3", (2, 2, 2), 4),
        *(slow("phi3", *c) for c in MORE_BITS),
        *(one_of_many(kind, (1, 1, 8), 4) for kind in ENCODER_DECODERS),
        *(
            one_of_many(kind, (1, 1 if kind == "t5gemma" else 2, 8), 8)  # 18 features of a shard
            for kind in ENCODER_DECODERS
        ),
    ],
)
def test_a_base_in_few_bits_is_its_rounded_weights_bit_for_bit(
    kind: str, split: tuple[int, ...], bits: int
) -> None:
    """Of which none takes gradients, or is written back."""
    of = case(kind)
    config = of.config(*split).with_values(ALL_LINEAR)
    weight_map = get_family(config).weight_map(config)
    adapters = {w.name for w in weight_map.weights} - {
        w.name for w in weight_map.without_adapters.weights
    }
    whole = dict(weight_map.without_adapters.from_hf(without_images(logical(of.model()))))
    expanded = {
        n: fake_quantize_weight(w, 4, bits) if is_quantized(n, w) else w for n, w in whole.items()
    }
    found = []
    packed_fields = {**QUANTISED, "model.quantization": f"int{bits}"}
    for fields, base in (({}, expanded), (packed_fields, whole)):
        model = fine_tuning(config.with_values(fields), gradients=True)  # so one is compiled above
        model.write({**weight_map.init_weights(0), **base})
        with model:
            losses = [model.run([of.batches[i]], [1e-2], i)[0].loss for i in range(2)]
            found.append((losses, dict(model.tensors(frozen=False))))
    (losses, plain), (packed_losses, packed) = found
    assert packed_losses == losses
    assert {name for name in packed if "/" not in name} == adapters
    for name, array in plain.items():
        assert packed[name].tobytes() == array.tobytes(), name
