"""Train the tokenizer of the sample conversations.

A byte-level one as the language models' (`train_gptj_tokenizer.py`), with the tokens and the chat
template of ChatML, as Qwen's have them: padding `<|endoftext|>` = 0, `<|im_start|>` = 1, and
`<|im_end|>` = 2, which ends what anybody says.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from data.sample.generate_conversations import generate_conversation_rows
from data.sample.train_gptj_tokenizer import train_byte_level_bpe

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer on the training conversations; deterministic."""
    texts = [
        f"{message['role']}\n{message['content']}\n {message['content']}"
        for row in generate_conversation_rows("train")
        for message in row["messages"]
    ]
    tokenizer = train_byte_level_bpe(texts, (PAD, START, END), eos_token=END, pad_token=PAD)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
