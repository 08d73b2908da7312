"""Adapters of PEFT beside an embedding that is the head too: the same model in both programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import run_export
import run_generation
from tests.modelling.peft_reference import with_peft
from tests.slow import slow
from tests.small_runs import BATCH, RATE, random_model, train

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")  # PEFT's

SMALL = ("--layers", "1", "--hidden_size", "32", "--heads", "2")
MODELS = {
    "decoder": (
        *("--config", "qwen3_tiny", "--num_hidden_layers", "1", "--hidden_size", "32"),
        *("--num_attention_heads", "2", "--model.num_key_value_heads", "2"),
        *("--model.vocab_size", "640", "--model.max_position_embeddings", "256"),
        *("--tokenizer", "data/sample/chat_tokenizer", "--model.tie_word_embeddings", "true"),
    ),
    "t5": ("--config", "tiny", *SMALL, "--d_ff", "32", "--model.embedding.tied", "true"),
}
QUERIES = {"decoder": ["q_proj", "v_proj"], "t5": ["q", "v"]}
ENDS = ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {kind: random_model(folder / kind, *given) for kind, given in MODELS.items()}


def model_in(kind: str, folder: Path) -> Any:
    cls = {"decoder": "AutoModelForCausalLM", "t5": "AutoModelForSeq2SeqLM"}[kind]
    return getattr(transformers, cls).from_pretrained(folder).eval()


def logits(kind: str, model: torch.nn.Module) -> np.ndarray:
    """In float64: merged weights would round other sums in float32 than adapters beside them."""
    input_ids = torch.arange(2, 26).reshape(2, 12)
    more = {"decoder_input_ids": input_ids + 9} if kind == "t5" else {}
    with torch.no_grad():
        found = model.double()(input_ids=input_ids, **more).logits.numpy()
    model.float()
    return found


def adapter_of_peft(
    kind: str, base: Path, folder: Path, parted: bool = False, **settings: Any
) -> np.ndarray:
    """Save an adapter whose whole modules differ from the base's; returns its model's logits.

    Args:
        parted: train the adapter of the head apart from the embedding's that it is tied to.
    """
    model = with_peft(model_in(kind, base), **{"r": 2, "target_modules": QUERIES[kind]} | settings)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter += 0.3 * torch.randn_like(parameter)
            if parted and "lm_head.lora_" in name:
                parameter.data = parameter + 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return logits(kind, model)


def exported(base: Path, adapter: Path, out: Path, *more: str) -> Path:
    given = ("--load", str(base), "--adapter.load", str(adapter), "--save-hf", str(out))
    assert run_export.main([*given, *more]) == 0
    return out


EMBEDDING = {"embed_tokens": 3}
TIED, BOTH = {"ensure_weight_tying": True}, {"embed_tokens": 3, "lm_head": 3}
DECODER: list[dict[str, Any]] = [
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    {"modules_to_save": ["lm_head", "norm"], "ensure_weight_tying": True},
    {"target_modules": ["q_proj", "embed_tokens"], "lora_alpha": 3},
    {"target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 3}},
    {"target_modules": ["q_proj", "embed_tokens"], **TIED, "lora_alpha": 3, "lora_dropout": 0.0},
    {"target_modules": r".*q_proj|.*embed_tokens", **TIED, "parted": True},
    {"target_modules": ["q_proj", "lm_head"], **TIED, "rank_pattern": BOTH, "alpha_pattern": BOTH},
]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("settings", DECODER)
def test_a_decoder_with_an_adapter_of_peft_is_the_same_merged_and_written_again(
    settings: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    base, adapter = bases["decoder"], tmp_path / "adapter"
    expected = adapter_of_peft("decoder", base, adapter, **settings, task_type="CAUSAL_LM")
    assert np.abs(expected - logits("decoder", model_in("decoder", base))).max() > 0.3
    whole = exported(base, adapter, tmp_path / "whole", "--merge")
    merged = model_in("decoder", whole)
    np.testing.assert_allclose(logits("decoder", merged), expected, rtol=1e-4, atol=1e-5)
    tied = settings.get("ensure_weight_tying", False) and not settings.get("parted")
    assert json.loads((whole / "config.json").read_text())["tie_word_embeddings"] == tied
    again = exported(base, adapter, tmp_path / "again")
    model = peft.PeftModel.from_pretrained(model_in("decoder", base), again).eval()
    np.testing.assert_allclose(logits("decoder", model), expected, rtol=1e-5, atol=1e-5)
    assert json.loads((again / "adapter_config.json").read_text())["ensure_weight_tying"] == tied


def copied_to_all(adapter: Path) -> None:
    """Give all modules of a T5 that have the embedding one tensor."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    copies = {f"base_model.model.{name}.weight": tensors["base_model.model.lm_head.weight"].clone()
              for name in ENDS}  # fmt: skip
    save_file({**tensors, **copies}, file)


def test_the_embedding_of_a_t5_is_written_for_each_module_that_has_it(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base, adapter = bases["t5"], tmp_path / "adapter"
    settings: dict[str, Any] = {"modules_to_save": ENDS, "task_type": "SEQ_2_SEQ_LM"}
    adapter_of_peft("t5", base, adapter, **settings)
    copied_to_all(adapter)
    model = peft.PeftModel.from_pretrained(model_in("t5", base), adapter).eval()
    expected = logits("t5", model)
    assert np.abs(expected - logits("t5", model_in("t5", base))).max() > 0.3
    whole = exported(base, adapter, tmp_path / "whole", "--merge")
    np.testing.assert_allclose(logits("t5", model_in("t5", whole)), expected, rtol=1e-4, atol=1e-5)
    again = exported(base, adapter, tmp_path / "again")
    model = peft.PeftModel.from_pretrained(model_in("t5", base), again).eval()
    np.testing.assert_allclose(logits("t5", model), expected, rtol=1e-5, atol=1e-5)


def one_adapter(model: Any) -> None:
    """Give the embeddings and the head of a T5 the values of one adapter."""
    stacks, head = (model.encoder, model.decoder), model.lm_head
    first, second = (stack.embed_tokens for stack in stacks)
    a, b = (getattr(first, f"lora_embedding_{n}")["default"].data for n in "AB")
    second.lora_embedding_A["default"].data, second.lora_embedding_B["default"].data = a, b
    head.lora_A["default"].weight.data, head.lora_B["default"].weight.data = b.T, a.T


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.usefixtures("few")
def test_an_adapter_of_the_embedding_of_a_t5_is_written_for_each_module_that_has_it(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, targets = bases["t5"], tmp_path / "adapter", ["q", "embed_tokens", "lm_head"]
    model = with_peft(model_in("t5", base), r=2, target_modules=targets)
    model.save_pretrained(tmp_path / "parted")
    given = ["--load", str(base), "--adapter.load", str(tmp_path / "parted")]
    assert run_export.main([*given, "--save-hf", str(tmp_path / "out")]) == 2
    assert "differ, but the configured model has one weight for both" in capsys.readouterr().err
    one_adapter(model.base_model.model)
    model.save_pretrained(adapter)
    expected = logits("t5", model)
    whole = exported(base, adapter, tmp_path / "whole", "--merge")
    np.testing.assert_allclose(logits("t5", model_in("t5", whole)), expected, rtol=1e-4, atol=1e-5)
    again = exported(base, adapter, tmp_path / "again")
    model = peft.PeftModel.from_pretrained(model_in("t5", base), again).eval()
    np.testing.assert_allclose(logits("t5", model), expected, rtol=1e-5, atol=1e-5)
    answers = []
    for source in (("--load", str(base), "--adapter.load", str(again)), ("--load", str(whole))):
        capsys.readouterr()
        assert run_generation.main([*source, "--generation.max_tokens", "8", "what is 3?"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_a_tied_head_of_another_rank_is_refused(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT scales what it adds by another number than the embedding's."""
    settings: dict[str, Any] = {"target_modules": ["embed_tokens"], **TIED}
    adapter = tmp_path / "adapter"
    adapter_of_peft("decoder", bases["decoder"], adapter, **settings, rank_pattern=EMBEDDING)
    given = ["--load", str(bases["decoder"]), "--adapter.load", str(adapter)]
    assert run_export.main([*given, "--merge", "--save-hf", str(tmp_path / "out")]) == 2
    assert "rank_pattern is" in capsys.readouterr().err


@pytest.mark.parametrize("saved", [["shared"], ["lm_head"], ["embed_tokens"]])
def test_a_part_of_what_is_one_weight_in_a_t5_is_refused(
    saved: list[str], bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter_of_peft("t5", bases["t5"], tmp_path / "adapter", modules_to_save=saved)
    given = ["--load", str(bases["t5"]), "--adapter.load", str(tmp_path / "adapter")]
    assert run_export.main([*given, "--merge", "--save-hf", str(tmp_path / "out")]) == 2
    assert f"with modules_to_save {','.join(ENDS)}" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["modules_to_save", "targets"])
@pytest.mark.parametrize("name", ["embed_tokens", "lm_head", "embed_tokens,lm_head"])
def test_a_tied_weight_is_meant_by_each_of_its_names(
    field: str, name: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """An adapter that begins is its base, in PEFT too, which loads it."""
    given = ("--load", str(bases["decoder"]), "--adapter.rank", "2")
    out = (f"--adapter.{field}", name, "--save-hf", str(tmp_path / "out"))
    assert run_export.main([*given, *out]) == 0
    base = model_in("decoder", bases["decoder"])
    expected = logits("decoder", base)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert model.get_input_embeddings().weight is base.get_output_embeddings().weight
    np.testing.assert_allclose(logits("decoder", model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("weights", "name", "tied"),
    [
        ("resident", "lm_head", {}),
        slow("resident", "embed_tokens", TIED),
        ("streamed", "embed_tokens", TIED),
        slow("streamed", "lm_head", {}),
        slow("streamed", "embed_tokens", {}),
    ],
)
def test_an_adapter_of_an_end(
    weights: str,
    name: str,
    tied: dict[str, Any],
    bases: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other end stays if they are not tied, as in PEFT, and the model writes as the merged one
    does."""
    base, adapter, targets = bases["decoder"], tmp_path / "adapter", ["q_proj", name]
    settings: dict[str, Any] = {"target_modules": targets, "lora_alpha": 16, **tied}
    expected = adapter_of_peft("decoder", base, adapter, **settings)
    whole = exported(base, adapter, tmp_path / "whole", "--merge")
    found = logits("decoder", model_in("decoder", whole))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    again = exported(base, adapter, tmp_path / "again")
    model = peft.PeftModel.from_pretrained(model_in("decoder", base), again).eval()
    np.testing.assert_allclose(logits("decoder", model), expected, rtol=1e-5, atol=1e-5)
    sources = (("--load", str(base), "--adapter.load", str(again)), ("--load", str(whole)))
    answers = []
    for source in (*sources, ("--load", str(base))):
        capsys.readouterr()
        few = ("--generation.max_tokens", "8", "--no_template", "--generation.weights", weights)
        assert run_generation.main([*source, *few, "what is 3?"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_run_begins_with_an_adapter_that_has_a_head_of_its_own(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """At a rate that changes nothing; it is resumed, and evaluated, with the base's embedding."""
    base, adapter = bases["decoder"], tmp_path / "adapter"
    settings: dict[str, Any] = {"modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}
    expected = adapter_of_peft("decoder", base, adapter, **settings)
    still = (*BATCH, *RATE, "--learning_rate", "1e-30", "--sequence_length", "128")
    data = ("--data.train", "data/sample/conversations/train.jsonl", "--data.validation", "0.1")
    given = ("--load", str(base), "--adapter.load", str(adapter), *data, *still)
    for steps in ("2", "4"):
        assert train(tmp_path / "run", *given, "--steps", steps) == 0
    out = ("--merge", "--save-hf", str(tmp_path / "whole"))
    assert run_export.main(["--load", str(tmp_path / "run"), *out]) == 0
    found = logits("decoder", model_in("decoder", tmp_path / "whole"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_flag_against_the_adapter_is_refused(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter_of_peft("decoder", bases["decoder"], tmp_path / "a", modules_to_save=["lm_head"])
    given = ["--load", str(bases["decoder"]), "--adapter.load", str(tmp_path / "a")]
    given += ["--model.tie_word_embeddings", "true", "--save-hf", str(tmp_path / "out")]
    assert run_export.main(given) == 2
    assert "model.tie_word_embeddings is False in" in capsys.readouterr().err
