"""Conversations with a model, and with transformers' of the same folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import run_export
import run_generation
from checkpoints import CheckpointStore
from config.llama import LlamaConfig
from config.presets import load_config
from data.causal_lm import CAUSAL_LM
from data.conversations import Conversation
from data.data_cache import DataCache
from data.pipeline import Pipeline
from data.tokenizer import save_tokenizer
from files.run_folder import RunFolder
from huggingface import hub
from planning.config_loader import CONFIG_LOADER
from run.answers import chat_session
from run.answers.generate import prompts_from_file
from sessions.session import ModelSession
from terminal.command_line import read_command_line
from tests.data.chat_templates import TEMPLATES, chat_tokenizer, plain

TOKENS = 12
SIZES = (
    *("--num_hidden_layers", "1", "--hidden_size", "32", "--model.intermediate_size", "32"),
    *("--num_attention_heads", "4", "--model.num_key_value_heads", "2"),
    *("--model.max_position_embeddings", "128", "--model.initializer_range", "0.5"),
    *("--model.vocab_size", "640"),
)
SYSTEM = {"role": "system", "content": "Answer in one word."}
ASKED = {"role": "user", "content": "Who took the lamp ☃?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random Qwen3 whose template ends answers with another token than texts end with."""
    base = tmp_path_factory.mktemp("chat")
    chat_tokenizer(plain(TEMPLATES["qwen3"])).save_pretrained(base / "tokenizer")
    given = [
        "--config",
        "qwen3_tiny",
        "--load",
        "random",
        *SIZES,
        "--data.format",
        "conversational",
    ]
    given += ["--tokenizer", str(base / "tokenizer"), "--data.chat_variables",
              '{"enable_thinking": false}', "--save-hf", str(base / "hf")]  # fmt: skip
    assert run_export.main(given) == 0
    return base / "hf"


def command(folder: Path) -> list[str]:
    return ["--model", str(folder), "--config", "qwen3_tiny", "--sequence_length", "128",
            "--generation.max_tokens", str(TOKENS), "--device", "cpu"]  # fmt: skip


def of_transformers(folder: Path, messages: list[dict[str, str]]) -> str:
    """Return transformers' answer, from the folder alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    asked = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        enable_thinking=False,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        found = model.generate(**asked, max_new_tokens=TOKENS)[0][asked["input_ids"].shape[1] :]
    return str(tokenizer.decode(found, skip_special_tokens=True)).strip()


def test_the_export_has_template_and_the_token_that_ends_an_answer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.chat_template == plain(TEMPLATES["qwen3"])
    assert GenerationConfig.from_pretrained(folder).eos_token_id == ends != tokenizer.eos_token_id


def test_conversations_of_a_file_are_answered_as_by_transformers(
    folder, tmp_path, capsys, executables, monkeypatch
):
    monkeypatch.setenv("POPXL_CACHE_DIR", str(executables))
    longer = [SYSTEM, ASKED, {"role": "assistant", "content": "Anna"}, ASKED]
    rows = [{"messages": [ASKED]}, {"messages": longer},
            {"messages": [*longer, {"role": "assistant", "content": "left out"}]}]  # fmt: skip
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded, load = [], hub.load_tokenizer
    monkeypatch.setattr(hub, "load_tokenizer", lambda name: loaded.append(name) or load(name))
    assert run_generation.main([*command(folder), "--file", str(file)]) == 0
    assert len(loaded) == 1
    found = [json.loads(line)["generated"] for line in capsys.readouterr().out.splitlines()]
    expected = [of_transformers(folder, talk) for talk in ([ASKED], longer)]
    assert found == [*expected, expected[1]]
    assert len(set(found)) == 2


def test_a_conversation_goes_on(folder, capsys, executables, monkeypatch):
    monkeypatch.setenv("POPXL_CACHE_DIR", str(executables))
    monkeypatch.setattr(
        chat_session, "MIN_PROMPT_TOKENS", 32
    )  # the second question needs another program
    lines = f"{ASKED['content']}\n\n{ASKED['content']}\n/new\n{ASKED['content']}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    loads, write = [], ModelSession.write
    monkeypatch.setattr(ModelSession, "write", lambda *given: (loads.append(1), write(*given))[1])
    assert run_generation.main([*command(folder), "--chat"]) == 0
    assert len(loads) == 2  # for each program, not for each answer
    first = of_transformers(folder, [ASKED])
    second = of_transformers(folder, [ASKED, {"role": "assistant", "content": first}, ASKED])
    assert capsys.readouterr().out.splitlines() == f"{first}\n{second}\n{first}".splitlines()


def test_sampling_is_changed_within_a_conversation(folder, capsys, executables, monkeypatch):
    """Greedy answers are transformers' again, once the temperature is 0."""
    monkeypatch.setenv("POPXL_CACHE_DIR", str(executables))
    lines = ["/top_k 1", "/temperature hot", "/what", "/help", ASKED["content"], "/new",
             "/temperature 0", ASKED["content"]]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert run_generation.main([*command(folder), "--chat", "--temperature", "5"]) == 0
    out, err = capsys.readouterr()
    expected = of_transformers(folder, [ASKED])
    assert out.splitlines() == f"{expected}\n{expected}".splitlines()
    assert "top_k is 1 from now on\n" in err
    assert "error: generation.temperature is 'hot', but must be a number" in err
    assert "there is no command '/what': /help lists them\n" in err
    assert "/NAME VALUE sets one of temperature, top_k, top_p" in err


def test_an_answer_comes_in_pieces_that_are_words(folder, executables, monkeypatch):
    monkeypatch.setenv("POPXL_CACHE_DIR", str(executables))
    shown_pieces: list[str] = []
    with chat_session.ChatSession(config_of(folder, "--data.format", "conversational")) as partner:
        answer = partner.answer(ASKED["content"], shown_pieces.append)
    assert answer == "".join(shown_pieces) == of_transformers(folder, [ASKED])
    assert len(shown_pieces) > 2


# ---- what is asked ------------------------------------------------------------------------------
class Listener(chat_session.ChatSession):
    """Remembers what it was asked, and says nothing new."""

    def __init__(self, config: Any) -> None:
        self._config, self._messages, self._prompt_tokens = config, [], 0
        self._data = chat_session.Pipeline(config, CAUSAL_LM)
        self._chat = self._data.chat_template

    def asked(self, text: str) -> str:
        self._messages.append(chat_session.make_message("user", text))
        self._encode_prompt()
        prompt = self._format_prompt()
        self._messages.append(chat_session.make_message("assistant", "Anna"))
        return prompt


def config_of(folder: Path, *flags: str) -> Any:
    given = [*command(folder), *flags]
    return read_command_line("", "inference", "tiny", given, None, CONFIG_LOADER).config


def test_the_oldest_messages_of_a_long_conversation_are_left_out(folder, capsys):
    listener = Listener(config_of(folder, "--sequence_length", "112", "--data.system", "Be brief."))
    prompts = [listener.asked(f"Who took the lamp {number}?") for number in range(6)]
    assert "more than 112 tokens: the oldest messages are left out" in capsys.readouterr().err
    assert "lamp 0" in prompts[0]
    assert "lamp 0" not in prompts[-1]
    assert all("Be brief." in prompt for prompt in prompts)
    assert "lamp 4" in prompts[-1]


def test_a_file_can_be_one_conversation(folder, tmp_path):
    config = config_of(folder)
    for name, content in (("a.json", [SYSTEM, ASKED]), ("b.json", {"messages": [SYSTEM, ASKED]})):
        (tmp_path / name).write_text(json.dumps(content))
        (asked,) = prompts_from_file(config, str(tmp_path / name), False, DataCache())
        assert asked.text.startswith("<|im_start|>system\nAnswer in one word.<|im_end|>")


def test_what_does_not_go_together_is_said(folder, capsys):
    assert run_generation.main([*command(folder), "--chat", "a prompt"]) == 2
    assert "--chat reads what is typed" in capsys.readouterr().err


def test_a_run_keeps_the_template_of_a_file_that_is_gone(tmp_path):
    (tmp_path / "gone.jinja").write_text(plain(TEMPLATES["gemma"]))
    chat_tokenizer(None).save_pretrained(tmp_path / "tokenizer")
    over = {
        "data": {
            "format": "conversational",
            "tokenizer": str(tmp_path / "tokenizer"),
            "chat_template": str(tmp_path / "gone.jinja"),
        },
        "model": {"vocab_size": 640},
    }
    config = load_config(LlamaConfig, "finetuning", "qwen3_tiny", over)
    tokenizer = Pipeline(config, CAUSAL_LM).tokenizer
    with CheckpointStore(tmp_path / "run") as store:
        texts = {"config.yml": yaml.safe_dump(config.to_dict())}
        store.save(1, {"weight": np.zeros(1)}, {}, wait=True, texts=texts)
    save_tokenizer(tokenizer, RunFolder(tmp_path / "run"))
    for name in ("gone.jinja", "tokenizer"):
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    found = LlamaConfig.from_dict(CONFIG_LOADER.from_load(str(tmp_path / "run")) or {})
    again = Pipeline(found, CAUSAL_LM)
    assert again.chat_template.render_prompt(Conversation([ASKED])).startswith(
        "<|endoftext|><start_of_turn>user"
    )
    assert again.config.model.eos_token_id == tokenizer.eos_token_id
