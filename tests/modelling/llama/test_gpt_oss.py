"""gpt-oss's files, experts in bfloat16 or MXFP4; the gate of its experts; and where they tie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import popxl
from files.json_files import JsonObject
from huggingface.model_folders import read_hf_directory, write_hf_directory
from modelling.llama.config_json import from_config_json, to_config_json
from modelling.llama.model import clamped_swiglu
from modelling.weights import WeightsError
from modelling.weights.mxfp4 import dequantize_mxfp4
from popxl import constant, ops
from popxl.transforms import autodiff
from popxl_addons.ops.routing import repeat_by_group, scatter_router_weights
from run.resume import resolve_initial_state
from tests.modelling.llama.hf import (
    as_parameters,
    hf_config,
    hf_model,
    our_config,
    weights_of,
)
from tests.modelling.llama.training import batches
from tests.modelling.sessions import fine_tuning
from tests.modelling.torch_training import train
from tests.modelling.weight_maps import base_weight_map
from tests.popxl.ops.harness import evaluate, rand

LIMIT, SLOPE = 0.7, 1.3


# ---- ops ----------------------------------------------------------------------------------------
def test_the_gate_and_its_gradient_are_transformers() -> None:
    """Also of numbers at their limits, which 16-bit types often have."""
    both, dy = rand(9, 10), rand(9, 5, seed=1)
    both[0] = LIMIT
    both[1, 5:] = -LIMIT
    x = torch.tensor(both.astype(np.float32), requires_grad=True)
    experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(
        hf_config("gpt_oss", swiglu_limit=LIMIT, swiglu_alpha=SLOPE)
    )
    expected = experts._apply_gate(torch.stack(x.split(5, -1), -1).flatten(-2))
    expected.backward(torch.tensor(dy.astype(np.float32)))
    y, d_both = with_gradients(
        lambda t: clamped_swiglu(*ops.split(t, 2, axis=-1), LIMIT, SLOPE), *single(both, dy)
    )
    np.testing.assert_allclose(y, expected.detach(), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(d_both, x.grad, rtol=2e-6, atol=1e-6)


def test_weights_are_spread_over_all_experts_and_their_gradients_come_back() -> None:
    chosen = np.array([[3, 0], [1, 2], [2, 3]], np.int32)
    weights, dy = rand(3, 2), rand(3, 5, seed=1)
    expected = np.zeros((3, 5))
    np.put_along_axis(expected, chosen, weights, 1)
    y, back = with_gradients(
        lambda w: scatter_router_weights(w, constant(chosen), experts=5), *single(weights, dy)
    )
    np.testing.assert_array_equal(y, expected.astype(np.float32))
    np.testing.assert_array_equal(back, np.take_along_axis(dy, chosen, 1).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_get_the_vector_of_their_group_and_give_it_their_gradients(dtype: type) -> None:
    sizes, vectors = np.array([2, 0, 3, 1], np.int32), rand(4, 3).astype(dtype)
    dy = rand(7, 3, seed=1).astype(dtype)  # one row is of no group
    groups = np.repeat(np.arange(4), sizes)
    build = lambda v: repeat_by_group(v, constant(sizes), rows=7)  # noqa: E731
    y, back = with_gradients(build, vectors, dy=dy)
    expected = np.zeros((4, 3))
    np.add.at(expected, groups, dy[:6].astype(np.float64))
    np.testing.assert_array_equal(y, [*vectors[groups], np.zeros(3)])
    np.testing.assert_allclose(back, expected, rtol=2 * np.finfo(dtype).eps, atol=1e-6)


def single(*arrays: np.ndarray) -> list[np.ndarray]:
    return [x.astype(np.float32) for x in arrays]


def with_gradients(
    build: Callable[[popxl.Tensor], popxl.Tensor], x: np.ndarray, dy: np.ndarray
) -> list[np.ndarray]:
    def both(x: popxl.Tensor, dy: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        graph = popxl.gir().create_graph(build, x)
        gradient = autodiff(graph)
        call = ops.call_with_info(graph, x)
        return call.outputs[0], *ops.call(
            gradient.graph, dy, inputs_dict=gradient.inputs_dict(call)
        )

    return evaluate(both, x, dy)


# ---- files --------------------------------------------------------------------------------------
def packed_like(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights, with random numbers in MXFP4 in place of the experts' maps."""
    rng = np.random.default_rng(3)
    found = dict(weights)
    for name, x in weights.items():
        if x.ndim == 3:
            experts, inside, out = found.pop(name).shape
            shape = experts, out, inside // 32
            found[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
            found[f"{name}_scales"] = rng.integers(118, 125, shape).astype(np.uint8)
    return found


def expanded_by_transformers(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {n: x for n, x in weights.items() if not n.endswith(("_blocks", "_scales"))}
    for name in (n.removesuffix("_blocks") for n in weights if n.endswith("_blocks")):
        parts = (torch.tensor(weights[name + end]) for end in ("_blocks", "_scales"))
        found[name] = convert_moe_packed_tensors(*parts).float().numpy()
    return found


def test_experts_in_mxfp4_are_what_transformers_expands_bit_for_bit(tmp_path: Path) -> None:
    hf_cfg = hf_config("gpt_oss", hidden_size=64, intermediate_size=32)
    config = our_config(hf_cfg)
    weights = packed_like(weights_of(hf_model(hf_cfg)))
    write_hf_directory(tmp_path / "hf", weights, to_config_json(config))
    weight_map, files = base_weight_map(config), read_hf_directory(tmp_path / "hf")
    weight_map.check_shapes({n: x.shape for n, x in weights.items()})
    logical = weight_map.from_hf(files)
    assert logical[weight_map.hf_names.fused[EXPERTS].weight_names[0]].dtype == ml_dtypes.bfloat16
    written, expected = weight_map.to_hf(logical), expanded_by_transformers(weights)
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[n].astype(np.float32), x) for n, x in expected.items())


EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def test_a_published_folder_is_where_a_run_starts(tmp_path: Path) -> None:
    """With a config.json that says it is in MXFP4."""
    hf_cfg = hf_config("gpt_oss", hidden_size=64, intermediate_size=32)
    config, weights = our_config(hf_cfg), packed_like(weights_of(hf_model(hf_cfg)))
    packed = {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    }
    write_hf_directory(tmp_path / "hf", weights, to_config_json(config) | packed)
    checkpoint = replace(config.checkpoint, load=str(tmp_path / "hf"))
    start = resolve_initial_state(replace(config, checkpoint=checkpoint), base_weight_map(config))
    found = base_weight_map(config).to_hf(start.tensors)
    for name, x in expanded_by_transformers(weights).items():
        np.testing.assert_array_equal(found[name].astype(np.float32), x)


def test_all_bytes_and_all_scales_that_are_numbers() -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(255, 1)
    scales = np.arange(255, dtype=np.uint8)[None, :, None].repeat(16, 2)
    hf_cfg = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    ours = dequantize_mxfp4(blocks, scales).swapaxes(1, 2)
    np.testing.assert_array_equal(ours.view(np.int16), hf_cfg.view(torch.int16).numpy())


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"damaged: it has blocks \(1, 2, 3, 16\) with scales"):
        dequantize_mxfp4(np.zeros((1, 2, 3, 16), np.uint8), np.zeros((1, 2, 4), np.uint8))


def test_the_published_description_is_read() -> None:
    """openai/gpt-oss-20b's, whose weights are in MXFP4."""
    given = {
        "model_type": "gpt_oss", "attention_bias": True, "eos_token_id": 200002, "head_dim": 64,
        "experts_per_token": 4, "hidden_act": "silu", "initial_context_length": 4096,
        "max_position_embeddings": 131072, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "vocab_size": 201088,
    }  # fmt: skip
    read = from_config_json(JsonObject(given, "config.json"))
    expected = {
        "layer_types": "sliding_attention,full_attention", "sliding_window": 128,
        "num_experts": 32, "num_experts_per_tok": 4, "attention_bias": True, "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702, "router_aux_loss_coef": 0,
    }  # fmt: skip
    assert {name: read[name] for name in expected} == expected
    assert not read["rope_parameters"]["truncate"]


# ---- ties ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_where_all_experts_tie_a_step_is_transformers() -> None:
    """Whichever of experts that are alike are chosen: their gradients add up to the same."""
    hf_cfg, given = hf_config("gpt_oss", num_hidden_layers=2), batches(1)
    model = hf_model(hf_cfg)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".experts." in name:
                p.copy_(p[:1].expand_as(p))
            elif ".router." in name:
                p.zero_()
    start, config = weights_of(model), our_config(hf_cfg, 1, 2)
    expected = train(model.double(), given, lambda batch: loss_of(model, batch), 0.0)
    weight_map = base_weight_map(config)
    ours = fine_tuning(config, gradients=True)
    ours.write(weight_map.from_hf(start))
    with ours:
        (step,) = ours.run(given, [0.0], 0)
        gradients = as_parameters(weight_map, ours.gradients())
    assert step.loss == pytest.approx(expected.losses[0], abs=1e-5)
    for name, theirs_of in expected.gradients.items():
        pair = gradients[name], theirs_of
        a, b = (x.sum(0) if ".experts." in name else x for x in pair)
        scale = 1.0 if ".router." in name else np.linalg.norm(b)  # the former's are 0
        assert np.linalg.norm(a - b) < 1e-4 * scale, name


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
