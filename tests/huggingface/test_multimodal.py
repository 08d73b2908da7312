"""Models of texts and images as transformers writes them: the text part is ours, all else stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import run_export
import run_finetuning
import run_generation
from config.errors import ConfigError
from files.json_files import JsonObject
from huggingface.multimodal import text_model_config
from planning.config_loader import CONFIG_LOADER
from tests.data.corpora import sample_tokenizer
from tests.huggingface.hub_folders import TEXT
from tests.huggingface.published import facts, small

SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
KINDS = {
    "gemma3": (
        "Gemma3",
        {"query_pre_attn_scalar": 10, "sliding_window": 8, "eos_token_id": [0, 7]},
        {"vision_config": SIGLIP, "mm_tokens_per_image": 4},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "tie_word_embeddings": False},
        {"vision_config": SIGLIP | {"model_type": "pixtral"}, "tie_word_embeddings": False},
    ),
}  # fmt: skip
PROMPT = "Anna moved the lamp. Who moved it?"
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def save(kind: str, folder: Path, in_memory: bool) -> Any:
    """A random model and its tokenizer.

    Args:
        in_memory: with the weights' names that transformers 5 has in memory, not those it writes.
    """
    name, text, whole = KINDS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(text_config=TEXT | text, **whole)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.generation_config.update(**SAMPLING, eos_token_id=[0, 7, 9])
    model.save_pretrained(folder)
    sample_tokenizer("gptj").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    if in_memory:
        weights = load_file(folder / "model.safetensors")
        named = {in_memory_name(name): value for name, value in weights.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    return model


def in_memory_name(name: str) -> str:
    head, inside = name.removeprefix("language_model."), name.removeprefix("language_model.model.")
    if inside != name:
        return f"model.language_model.{inside}"
    return head if head != name else f"model.{name}"


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize(("names", "tied"), [(None, None), ([], True), (["lm_head.weight"], False)])
def test_weights_say_whether_the_head_is_the_embedding(said, names, tied):
    """Without them, the whole's config.json does, as transformers reads it."""
    whole = {"model_type": "gemma3", "text_config": {"hidden_size": 16}, **said}
    if tied is None:
        tied = transformers.Gemma3Config(**said).tie_word_embeddings
    text = text_model_config(JsonObject(whole, "config.json"), names).data
    assert text["tie_word_embeddings"] is tied


@pytest.mark.parametrize(("kind", "in_memory"), [("gemma3", False), ("mistral3", True)])
def test_an_export_is_the_whole_model_bit_for_bit(kind, in_memory, tmp_path, capsys):
    model = save(kind, tmp_path / "hub", in_memory)
    given = ["--model", str(tmp_path / "hub"), "--save-hf", str(tmp_path / "out")]
    assert run_export.main(given) == 0
    others = [n for n in model.state_dict() if is_other(n)]
    said = capsys.readouterr().err
    assert f"is a {kind}: its text part is read, the other {len(others)} weights stay" in said
    assert f"the {len(others)} weights besides the text part are" in said
    again = loaded(model, tmp_path / "out")
    assert all(torch.equal(x, again.state_dict()[n]) for n, x in model.state_dict().items())
    words = torch.arange(20)[None]
    assert torch.equal(again(input_ids=words).logits, model(input_ids=words).logits)
    check_settings(tmp_path / "out")


def test_new_tokens_give_the_text_part_of_an_export_more_rows(tmp_path):
    model = save("gemma3", tmp_path / "hub", False)
    rows = model.get_input_embeddings().weight.shape[0]
    given = ["--model", str(tmp_path / "hub"), "--model.vocab_size", str(rows + 8)]
    assert run_export.main([*given, "--save-hf", str(tmp_path / "out")]) == 0
    again = loaded(model, tmp_path / "out")
    assert again.get_input_embeddings().weight.shape[0] == rows + 8
    assert again.config.text_config.vocab_size == rows + 8
    words = torch.arange(20)[None]
    expected, found = (m(input_ids=words).logits for m in (model, again))
    assert torch.allclose(found[..., :rows], expected, rtol=1e-5, atol=1e-5)


def is_other(name: str) -> bool:
    return "vision" in name or "projector" in name


def loaded(model: Any, folder: Path) -> Any:
    again, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert again.state_dict().keys() == model.state_dict().keys()
    return again.eval()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "in_memory"), [("gemma3", True), ("mistral3", False)])
def test_the_text_part_is_trained_and_the_rest_comes_back(kind, in_memory, tmp_path, capsys):
    """What is exported is a model to begin with, and answers as transformers lets it."""
    model = save(kind, tmp_path / "hub", in_memory)
    run, out = tmp_path / "run", tmp_path / "out"
    flags = ["--config", "qwen3_tiny", "--data.dataset", "sample", "--device", "cpu",
             "--steps", "3", "--sequence_length", "48", "--output_length", "8",
             "--global_batch_size", "4", "--micro_batch_size", "4"]  # fmt: skip
    flags += ["--model", str(tmp_path / "hub")]
    assert run_finetuning.main([*flags, "--save", str(run)]) == 0
    assert run_export.main(["--load", str(run), "--save-hf", str(out)]) == 0
    again = loaded(model, out)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]) is is_other(name), name
    assert (out / "preprocessor_config.json").exists()
    check_settings(out)
    capsys.readouterr()
    asked = ["--load", str(out), "--no_template", "--generation.max_tokens", "6", "--device", "cpu"]
    assert run_generation.main([*asked, "--sequence_length", "32", PROMPT]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    words = tokenizer(PROMPT, return_tensors="pt")
    tokens = again.generate(**words, do_sample=False, max_new_tokens=6)[0]
    expected = tokenizer.decode(tokens[words["input_ids"].shape[1] :], skip_special_tokens=True)
    assert capsys.readouterr().out.strip() == expected.strip()


def check_settings(folder: Path) -> None:
    """What the base says of writing, and of types, is there."""
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings.items() >= SAMPLING.items()
    assert sorted(settings["eos_token_id"]) == [0, 7, 9]
    described = json.loads((folder / "config.json").read_text())
    assert described["dtype"] == "float32"
    assert "vision_config" in described


def test_without_the_base_the_text_part_is_written_as_a_model(tmp_path, capsys):
    model = save("gemma3", tmp_path / "hub", True)
    given = ["--model", str(tmp_path / "hub"), "--load", str(tmp_path / "hub")]
    gone = str(tmp_path / "gone")
    assert (
        run_export.main(
            [*given, "--model.multimodal_parent", gone, "--save-hf", str(tmp_path / "o")]
        )
        == 0
    )
    assert f"{gone} is not found: exporting the text model alone" in capsys.readouterr().err
    text = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path / "o")
    theirs = model.model.language_model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(text.model.embed_tokens.weight.detach().numpy(), theirs)


def test_quantized_weights_of_the_whole_are_refused(tmp_path):
    """Ministral 3's, in FP8."""
    data = small(facts()["mistralai/Ministral-3-3B-Instruct-2512"]["config"])
    data["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="give the model before its weights were quantized"):
        CONFIG_LOADER.from_model(str(tmp_path))
