"""Small chat templates in the forms of published ones, and a tokenizer that has their tokens."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.task import SAMPLE_FOLDER

BEGIN, END = "⟦", "⟧"
"""Around what the assistant writes: generation blocks, or nothing."""

_ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
_TURN = "{{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}"
_ALTERNATING = (
    "{%- if message.role != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/...') }}{%- endif %}"
)


def _chatml(answer: str, head: str = "", ask: str = _ASK) -> str:
    return (
        head + "{%- for message in messages %}{%- if message.role == 'assistant' %}"
        "{{- '<|im_start|>assistant\n' }}" + answer + "{{- '\n' }}"
        "{%- else %}" + _TURN + "{%- endif %}{%- endfor %}" + ask
    )


_THOUGHT = (
    "{%- set content = message.content or '' %}{%- set thought = message.reasoning_content or '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
)

TEMPLATES = {
    "chatml": _chatml("⟦{{- (message.content or '') + '<|im_end|>' }}⟧"),
    "tools": _chatml(
        "⟦{{- message.content or '' }}{%- for call in message.tool_calls or [] %}"
        "{{- '<tool_call>' }}{{- call.function | tojson }}{{- '</tool_call>' }}{%- endfor %}"
        "{{- '<|im_end|>' }}⟧",
        "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}"
        "{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}",
    ),
    # Thoughts go before the last answer alone.
    "qwen3": _chatml(
        _THOUGHT + "{%- if loop.last and (enable_thinking is not defined or enable_thinking) %}"
        "⟦{{- '<think>\n' + thought + '\n</think>\n\n' + content + '<|im_end|>' }}⟧"
        "{%- elif loop.last %}{{- '<think>\n\n</think>\n\n' }}"
        "⟦{{- content + '<|im_end|>' }}⟧{%- else %}⟦{{- content + '<|im_end|>' }}⟧{%- endif %}",
        ask=_ASK + "{%- if add_generation_prompt and enable_thinking is defined "
        "and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
    ),
    # Asks for the thought, as Qwen3's thinking models and DeepSeek's.
    "thinking": _chatml(
        _THOUGHT + "{%- if loop.last %}{{- '<think>\n' }}"
        "⟦{{- thought + '\n</think>\n\n' + content + '<|im_end|>' }}⟧"
        "{%- else %}⟦{{- content + '<|im_end|>' }}⟧{%- endif %}",
        ask=_ASK + "{%- if add_generation_prompt %}{{- '<think>\n' }}{%- endif %}",
    ),
    "llama3": (
        "{{- bos_token }}{%- for message in messages %}"
        "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
        "{%- if message.role == 'assistant' %}⟦{{- message.content | trim + '<|eot_id|>' }}⟧"
        "{%- else %}{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
    ),
    "mistral": (
        "{%- if messages and messages[0].role == 'system' %}{%- set system = messages[0].content %}"
        "{%- set turns = messages[1:] %}{%- else %}{%- set turns = messages %}{%- endif %}"
        "{{- bos_token }}{%- for message in turns %}" + _ALTERNATING + ""
        "{%- if message.role == 'user' %}{{- '[INST] ' "
        "+ (system + '\n\n' if system is defined and loop.first else '') "
        "+ message.content + ' [/INST]' }}"
        "{%- else %}⟦{{- ' ' + (message.content | trim) + eos_token }}⟧{%- endif %}{%- endfor %}"
    ),
    "gemma": (
        "{{- bos_token }}{%- if messages and messages[0].role == 'system' %}"
        "{{- raise_exception('System role not supported') }}{%- endif %}"
        "{%- for message in messages %}" + _ALTERNATING + ""
        "{%- if message.role == 'assistant' %}{{- '<start_of_turn>model\n' }}"
        "⟦{{- (message.content | trim) + '<end_of_turn>' }}⟧{{- '\n' }}"
        "{%- else %}{{- '<start_of_turn>' + message.role + '\n' "
        "+ (message.content | trim) + '<end_of_turn>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
    ),
    "phi": (
        "{%- for message in messages %}{{- '<|' + message.role + '|>\n' }}"
        "{%- if message.role == 'assistant' %}⟦{{- (message.content or '') + '<|end|>' }}⟧"
        "{{- '\n' }}{%- else %}{{- message.content + '<|end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- else %}{{- eos_token }}"
        "{%- endif %}"
    ),
}

ENDS = {
    "llama3": "<|eot_id|>", "mistral": "<|endoftext|>", "gemma": "<end_of_turn>", "phi": "<|end|>",
}  # fmt: skip
"""The token that ends an answer, where it is not ChatML's."""

DATED = TEMPLATES["llama3"].replace(
    "{%- for", "{{- 'Today: ' + strftime_now('%d %b %Y') + '\n' }}{%- for", 1
)

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
)  # fmt: skip


def plain(template: str) -> str:
    """Without generation blocks, as almost all templates are published."""
    return template.replace(BEGIN, "").replace(END, "")


def marked(template: str) -> str:
    """With generation blocks."""
    return template.replace(BEGIN, "{%- generation %}").replace(END, "{%- endgeneration %}")


@cache
def _tokens() -> PreTrainedTokenizerFast:
    base = AutoTokenizer.from_pretrained(SAMPLE_FOLDER / "gptj_tokenizer")
    base.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    base.add_tokens(["<think>", "</think>", "[INST]", "[/INST]"])
    begins = base.bos_token, base.bos_token_id
    base.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begins[0]} $A", special_tokens=[begins]
    )
    return base


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with this template; to texts without one it adds a first token."""
    base = deepcopy(_tokens())
    base.chat_template = template
    return base
