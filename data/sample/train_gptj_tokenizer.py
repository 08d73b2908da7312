"""Train the GPT-2-style tokenizer of the sample.

Byte-level byte-pair encoding (Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019), fitted to the texts of the training split: `<|endoftext|>` = 0, the padding token
`<|extratoken_1|>` = 1, and further extra tokens at the end. Encoding adds no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.task import TASKS

FOLDER = Path(__file__).parent / "gptj_tokenizer"
END, PAD = "<|endoftext|>", "<|extratoken_1|>"
MAX_TOKENS = 2048
"""Maximum vocabulary, more than the corpus fills: each of its words becomes one token."""
VOCAB_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this, so that tensor parallelism up to 64 shards it
evenly."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a GPT-2-style tokenizer on the sample's training split; deterministic."""
    examples = TASKS["sample"].read_corpus("train").examples
    texts = [f"{e.prompt} target: {e.target} " for e in examples]
    names = {"bos_token": END, "eos_token": END, "unk_token": END, "pad_token": PAD}
    return train_byte_level_bpe(texts, (END, PAD), **names)


def train_byte_level_bpe(
    texts: Sequence[str], special_tokens: Sequence[str], **names: str
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on texts; deterministic.

    Args:
        special_tokens: the first tokens of the vocabulary.
        names: special tokens by transformers' argument names, such as `eos_token`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_TOKENS,
        min_frequency=1,
        show_progress=False,
        special_tokens=[AddedToken(name, normalized=False) for name in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **names,
    )
    more = -len(fast) % VOCAB_MULTIPLE
    fast.add_tokens([f"<|extratoken_{i}|>" for i in range(2, more + 2)])
    return fast
