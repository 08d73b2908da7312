"""Tokenization at the boundary between prompt and answer, equal in training and generation.

A tokenizer joins characters of both sides to one token where it can: "A: " and "Anna" become "A:"
and " Anna". A model that was trained on that token cannot be asked with a prompt that ends with a
space. So the spaces at the end of a prompt belong to the answer, and a prompt has the tokens that
it has alone, whatever follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from data.document_chunks import CONTEXT_CHARACTERS
from data.examples import TokenizedText
from data.tokenizer import Tokenizer, chunk_texts, first_token_at_or_after


def encode_prompts(tokenizer: Tokenizer, prompts: Iterable[str]) -> Iterator[np.ndarray]:
    """Token ids of prompts as they precede an answer, int32 [n] each, n > 0.

    The tokenizer's first tokens, such as `<bos>`, precede them, those that it puts at the end do
    not follow. An empty prompt without such a token becomes the end token, which also preceded
    texts in the model's pretraining.
    """
    prefix_ids, _ = tokenizer.affix_ids
    for chunk in chunk_texts(prompts):
        for encoding in tokenizer.encode_with_offsets(
            [prompt.rstrip(" ") for prompt in chunk], False
        ):
            ids = [*prefix_ids, *encoding.ids] or [tokenizer.eos_token_id]
            yield np.asarray(ids, np.int32)


def encode_examples(
    tokenizer: Tokenizer, prompt_answer_pairs: Iterable[tuple[str, str]]
) -> Iterator[TokenizedText]:
    """Token ids and loss masks of prompts followed by their answers and the end token."""
    for chunk in chunk_texts(prompt_answer_pairs):
        prompts = encode_prompts(tokenizer, (prompt for prompt, _ in chunk))
        answers = _encode_answers(tokenizer, chunk)
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = np.append(prompt, tokenizer.append_eos(np.asarray(answer, np.int32)))
            yield TokenizedText(ids, np.arange(len(ids)) >= len(prompt))


def _encode_answers(
    tokenizer: Tokenizer, prompt_answer_pairs: Sequence[tuple[str, str]]
) -> Iterator[Sequence[int]]:
    """Token ids of answers, tokenized together with the last tokens of their prompts."""
    split_pairs = [_move_spaces_to_answer(prompt, answer) for prompt, answer in prompt_answer_pairs]
    encodings = tokenizer.encode_with_offsets(
        [prompt_end + answer for prompt_end, answer in split_pairs], False
    )
    for (prompt_end, answer), encoding in zip(split_pairs, encodings, strict=True):
        start = first_token_at_or_after(encoding, len(prompt_end))
        for preceding in (
            "\n",
            "",
        ):  # a token has characters of both: the answer after something else
            if start is None:
                (encoding,) = tokenizer.encode_with_offsets([preceding + answer], False)
                start = first_token_at_or_after(encoding, len(preceding))
        yield encoding.ids[start:]


def _move_spaces_to_answer(prompt: str, answer: str) -> tuple[str, str]:
    """Move the prompt's trailing spaces to the answer; returns both texts."""
    stripped = prompt.rstrip(" ")
    return stripped[-CONTEXT_CHARACTERS:], prompt[len(stripped) :] + answer
