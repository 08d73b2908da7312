"""Samples of decoder-only models: token sequences with loss masks, packed or one per sample.

Batches are dicts of int32 arrays, [n, sequence_length]:
    input_ids, labels                  labels being the tokens that follow
    segments                           number of a token's text in the sample, from 1; 0: padding
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from config.sections import RunConfig
from config.task import CausalLMData, LossOn, OnLongTarget
from data.examples import Example, Languages
from data.packing import EMPTY_SLOT, concatenate_packed_sequences, pack_sequences
from data.preference_samples import (
    SEGMENT_IDS,
    PreferencePair,
    PreferenceSamples,
    count_prompt_tokens,
    make_kto_labels,
)
from data.prompt_boundary import encode_examples, encode_prompts
from data.rollout_samples import RolloutSamples, TokenizedRollout
from data.sample_format import (
    SampleFormat,
    TokenInLoss,
    length_multiple,
    pad_prompts,
    sequences_without_loss,
)
from data.samples import (
    IGNORE_INDEX,
    Batch,
    Prompts,
    Samples,
    get_segment_ids,
    hash_arrays,
    select_objective_inputs,
)
from data.task import task_from_config
from data.token_sequences import TokenSequences
from data.tokenizer import TokenizedText, Tokenizer
from data.truncation import (
    NO_TRUNCATION,
    TokenLimit,
    TruncationCounts,
    left_truncated_indices,
    truncate_targets,
)
from files.formatting import format_name


@dataclass(frozen=True)
class TokenStream:
    """Token ids of several sequences, concatenated into one array.

    Attributes:
        tokens: int32 [n], token ids of all sequences, concatenated.
        targets: int32 [n], the same ids, `IGNORE_INDEX` for tokens outside the loss.
        offsets: int64 [sequences + 1], start of each sequence in `tokens`, and the end of the last.
        truncation: counts of truncated targets.
    """

    tokens: np.ndarray
    targets: np.ndarray
    offsets: np.ndarray
    truncation_counts: TruncationCounts = NO_TRUNCATION


@dataclass(frozen=True)
class TokenBlocks:
    """A token stream split into samples of equal length, with attention across sequences.

    A sequence attends to earlier ones in its block; only the last block is padded.

    Label and input are the same stream, one token apart, so that each token but the first is
    predicted once.

    Attributes:
        tokens: int32 [n], the stream.
        sequence_length: tokens of a block.
        targets: int32 [n], labels, `IGNORE_INDEX` for tokens outside the loss; None: all tokens.
        truncation: counts of truncated targets.
        pad: id of the padding token.
    """

    tokens: np.ndarray
    sequence_length: int
    targets: np.ndarray | None = None
    truncation_counts: TruncationCounts = NO_TRUNCATION
    pad: int = 0

    @classmethod
    def from_stream(cls, stream: TokenStream, sequence_length: int, pad: int) -> TokenBlocks:
        """Split a token stream into samples of `sequence_length` tokens each."""
        targets = None if stream.targets is stream.tokens else stream.targets
        return cls(stream.tokens, sequence_length, targets, stream.truncation_counts, pad)

    @property
    def digest(self) -> str:
        return hash_arrays(self.tokens, self.targets, self.sequence_length)

    def __len__(self) -> int:
        return -(-max(len(self.tokens) - 1, 0) // self.sequence_length)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`: arrays by name, int32 [n, sequence_length]."""
        starts = np.asarray(indices, np.int64).reshape(-1, 1) * self.sequence_length
        positions = starts + np.arange(self.sequence_length)
        is_token = positions < len(self.tokens) - 1
        input_indices = np.where(is_token, positions, 0)
        label_indices = np.where(is_token, positions + 1, 0)
        targets = self.tokens if self.targets is None else self.targets
        return {
            "input_ids": np.where(is_token, self.tokens[input_indices], np.int32(self.pad)),
            "segment_ids": is_token.astype(np.int32),
            "labels": np.where(is_token, targets[label_indices], np.int32(IGNORE_INDEX)),
        }


@dataclass(frozen=True)
class PackedSequences:
    """Whole sequences packed into samples; attention does not cross sequence boundaries.

    Those too long for a sample lose their beginning: the end holds the answer.

    Attributes:
        stream: the texts.
        samples: int64 [n, places], see `data.packing.pack_sequences`.
        sequence_length: tokens of a sample.
        pad: id of the padding token.
        num_fixed: tokens at the beginning of each text, such as `<bos>`, that stay.
    """

    stream: TokenStream
    samples: np.ndarray
    sequence_length: int
    pad: int
    num_fixed: int = 0

    @classmethod
    def from_stream(
        cls,
        stream: TokenStream,
        sequence_length: int,
        pad: int,
        max_per_sample: int = 1,
        num_fixed: int = 0,
    ) -> PackedSequences:
        """Pack all sequences into samples of at most `max_per_sample` sequences."""
        # The last token of a text is predicted, but not read.
        lengths = np.clip(np.diff(stream.offsets) - 1, 1, sequence_length)
        return cls(
            stream,
            pack_sequences(lengths, sequence_length, max_per_sample),
            sequence_length,
            pad,
            num_fixed,
        )

    @property
    def truncation_counts(self) -> TruncationCounts:
        """Counts of prompts and targets that were truncated to fit into samples."""
        long = np.diff(self.stream.offsets) > self.sequence_length + 1
        return self.stream.truncation_counts + TruncationCounts(int(np.count_nonzero(long)))

    @property
    def digest(self) -> str:
        stream = self.stream
        return hash_arrays(stream.tokens, stream.targets, stream.offsets, self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`: arrays by name, int32 [n, sequence_length]."""
        sample_sequences = self.samples[np.asarray(indices, np.int64)]
        sequence_indices, stream = self._stream_indices, self.stream
        input_ids, segment_ids = concatenate_packed_sequences(
            sample_sequences,
            lambda i: stream.tokens[sequence_indices(i)][:-1],
            self.sequence_length,
            self.pad,
        )
        labels, _ = concatenate_packed_sequences(
            sample_sequences,
            lambda i: stream.targets[sequence_indices(i)][1:],
            self.sequence_length,
            IGNORE_INDEX,
        )
        return {"input_ids": input_ids, "segment_ids": segment_ids, "labels": labels}

    def _stream_indices(self, index: int) -> np.ndarray:
        """Indices of a sequence's tokens in the token stream, truncated to the sample's length."""
        start, end = self.stream.offsets[index], self.stream.offsets[index + 1]
        return start + left_truncated_indices(end - start, self.sequence_length + 1, self.num_fixed)


@dataclass(frozen=True)
class CausalLM(SampleFormat):
    """Sample format of decoder-only models: how examples become samples and program inputs."""

    name: str = "causal_lm"
    sample_tokenizer: str = "gptj_tokenizer"
    output_field: str = "output_length"
    trains_whole_chats: bool = True

    def resolve_loss_on(self, config: RunConfig) -> LossOn:
        """Turns or texts in the loss (`data.loss_on`), by default "completion" or "all"."""
        data = _causal_lm_data(config)
        return data.loss_on or ("completion" if data.format == "conversational" else "all")

    def render_prompt(self, config: RunConfig, prompt: str) -> str:
        """Append the separator to a prompt."""
        return prompt + _prompt_target_separator(config)

    def render_example(self, config: RunConfig, example: Example) -> Example:
        """Concatenate an example's prompt and target if the separator is empty."""
        if example.doc_chunk is not None:
            return example
        if _prompt_target_separator(config):
            return super().render_example(config, example)
        return example.with_joined_target()

    def with_data_settings(self, config: RunConfig, separator: str) -> RunConfig:
        data = _causal_lm_data(config)
        if data.separator is None:
            data = replace(data, separator=separator)
        return replace(config, data=data)

    def tokenize(
        self, config: RunConfig, examples: Sequence[Example], tokenizer: Tokenizer
    ) -> Iterator[TokenizedText]:
        if _causal_lm_data(config).format == "language_modeling":
            return tokenizer.encode_doc_chunks(
                (e.target, e.doc_chunk) for e in examples if e.doc_chunk is not None
            )
        if tokenizer.chat:
            return tokenizer.encode_with_loss_mask(example.text_spans() for example in examples)
        return encode_examples(
            tokenizer, (example.split_prompt_and_answer() for example in examples)
        )

    def make_samples(
        self,
        config: RunConfig,
        examples: Sequence[Example],
        tokenized: Sequence[TokenizedText],
        tokenizer: Tokenizer,
        for_eval: bool,
    ) -> Samples:
        """Make packed sequences; with `data.packing` or for documents, blocks of a token stream."""
        data, length = _causal_lm_data(config), config.model.sequence_length
        if data.format == "language_modeling":
            return TokenBlocks.from_stream(
                concatenate_to_stream(tokenized), length, tokenizer.pad_token_id
            )
        packs, truncation = data.packing and not for_eval, NO_TRUNCATION
        if not tokenizer.chat:
            limit = self.target_token_limit(config)
            tokenized, truncation = truncate_answers(
                tokenized, examples, limit, data.on_long_target
            )
        elif not packs:
            limit = TokenLimit(length, "sequence_length", config.model.max_position_embeddings)
            tokenized, truncation = truncate_conversations(
                tokenized, examples, limit, data.on_long_target
            )
        answers_only = for_eval or self.resolve_loss_on(config) != "all"
        stream = concatenate_to_stream(tokenized, answers_only, truncation)
        if packs:
            return TokenBlocks.from_stream(stream, length, tokenizer.pad_token_id)
        num_fixed = len(tokenizer.affix_ids[0])
        return PackedSequences.from_stream(
            stream, length, tokenizer.pad_token_id, config.max_examples_per_sample, num_fixed
        )

    def encode_texts(
        self, examples: Sequence[Example], tokenizer: Tokenizer
    ) -> Iterator[np.ndarray]:
        for ids in tokenizer.encode(example.prompt for example in examples):
            yield ids if len(ids) else np.asarray([tokenizer.eos_token_id], np.int32)

    def make_sequence_samples(
        self,
        config: RunConfig,
        sequences: Sequence[np.ndarray],
        slots: np.ndarray,
        tokenizer: Tokenizer,
        truncation: TruncationCounts,
    ) -> TokenSequences:
        return TokenSequences(
            sequences,
            slots,
            config.model.sequence_length,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            "last_non_pad",
            truncation,
        )

    def make_pair_samples(
        self, config: RunConfig, pairs: Sequence[PreferencePair], tokenizer: Tokenizer
    ) -> PreferenceSamples:
        length, pairs_per_sample = config.model.sequence_length, config.max_examples_per_sample
        limit = TokenLimit(length, "sequence_length")  # positions begin anew in each text
        fitting_pairs, truncation = truncate_prompts(
            pairs, limit, config.data.on_long_target, tokenizer
        )
        sequences = [text for pair in fitting_pairs for text in pair.sequences]
        stream = concatenate_to_stream(sequences, True, truncation)
        lengths = np.maximum(np.diff(stream.offsets) - 1, 1).reshape(-1, 2).sum(axis=1)
        pair_indices = pack_sequences(lengths, length, pairs_per_sample)
        sequence_indices = np.where(
            pair_indices[..., None] == EMPTY_SLOT, EMPTY_SLOT, 2 * pair_indices[..., None] + [0, 1]
        )
        packed = PackedSequences(
            stream, sequence_indices.reshape(len(pair_indices), -1), length, tokenizer.pad_token_id
        )
        num_loss_tokens = np.asarray(
            [np.count_nonzero(text.loss_mask[1:]) for text in sequences], np.float32
        )
        return PreferenceSamples(
            packed, pair_indices, num_loss_tokens.reshape(-1, 2), make_kto_labels(fitting_pairs)
        )

    def make_rollout_samples(
        self,
        config: RunConfig,
        rollouts: Sequence[TokenizedRollout],
        examples: Sequence[Example],
        tokenizer: Tokenizer,
    ) -> RolloutSamples:
        length, on_long_target = config.model.sequence_length, config.data.on_long_target
        limit = TokenLimit(length, "sequence_length")
        fitting, truncation = truncate_prompts(rollouts, limit, on_long_target, tokenizer)
        stream = concatenate_to_stream([r.sequences[0] for r in fitting], True, truncation)
        packed = PackedSequences.from_stream(
            stream, length, tokenizer.pad_token_id, config.max_examples_per_sample
        )
        return RolloutSamples.from_rollouts(
            packed, packed.samples, fitting, examples, config.training
        )

    def fit_length_to_pairs(
        self, config: RunConfig, pairs: Sequence[PreferencePair], tokenizer: Tokenizer
    ) -> tuple[RunConfig, list[PreferencePair]]:
        max_tokens = config.model.sequence_length

        def truncate_prompt(text: TokenizedText) -> TokenizedText:
            excess = max(count_prompt_tokens(text) - max_tokens, 0)
            return (
                _truncate_left(text, excess, tokenizer.count_leading_special_tokens(text.ids))
                if excess
                else text
            )

        fitting_pairs = [
            replace(
                pair,
                sequences=(truncate_prompt(pair.sequences[0]), truncate_prompt(pair.sequences[1])),
            )
            for pair in pairs
        ]
        longest = max(sum(len(text.ids) - 1 for text in pair.sequences) for pair in fitting_pairs)
        multiple = length_multiple(config)
        length = -(-longest // multiple) * multiple
        return replace(config, model=replace(config.model, sequence_length=length)), fitting_pairs

    def target_token_limit(self, config: RunConfig) -> TokenLimit:
        """Maximum target tokens: the smaller of output length and sequence length."""
        length, room = config.model.sequence_length, self.max_new_tokens(config)
        limit = (length, "sequence_length") if room >= length else (room, self.output_field)
        return TokenLimit(*limit, config.model.max_position_embeddings)

    def make_prompts(
        self,
        config: RunConfig,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        languages: Sequence[Languages] = (),
    ) -> tuple[RunConfig, Prompts]:
        """Tokenize prompts; those longer than `sequence_length` are truncated on the left."""
        rows = list(encode_prompts(tokenizer, texts))
        return pad_prompts(config, texts, rows, tokenizer, length_multiple(config), True)

    def encode_targets(
        self,
        config: RunConfig,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        languages: Sequence[Languages] = (),
    ) -> list[np.ndarray]:
        if tokenizer.chat:
            return [tokenizer.append_eos(ids) for ids in tokenizer.encode(texts)]
        examples = (self.render_example(config, Example("", text)) for text in texts)
        tokenized = encode_examples(
            tokenizer, (example.split_prompt_and_answer() for example in examples)
        )
        return [tokens.ids[tokens.loss_mask] for tokens in tokenized]

    def count_example_tokens(self, tokenized: TokenizedText) -> tuple[int, int]:
        """Count an example's tokens that the model reads; the last token is only a label."""
        return len(tokenized.ids) - 1, _count_trailing_loss_tokens(tokenized.loss_mask)

    def count_predicted_positions(self, config: RunConfig) -> int:
        """Number of predicted tokens of a sample: one for each position."""
        return config.model.sequence_length

    def make_random_samples(
        self, config: RunConfig, count: int, mean_tokens: float | None
    ) -> TokenBlocks:
        """Make random token blocks of the configured sequence length, for benchmarks."""
        model = config.model
        rng = np.random.default_rng(model.seed)
        length = count * model.sequence_length + 1
        stream = rng.integers(0, model.vocab_size, length, np.int32)
        return TokenBlocks(stream, model.sequence_length)

    def to_program_inputs(self, batch: Batch) -> dict[str, np.ndarray]:
        segment_ids = get_segment_ids(batch)
        return {
            "input_ids": batch["input_ids"],
            "segment_starts": compute_segment_starts(segment_ids),
            SEGMENT_IDS: segment_ids,
            **select_objective_inputs(batch),
        }

    def sequences_with_loss_mask(self, batch: Batch) -> list[list[TokenInLoss]]:
        if "labels" not in batch:
            return sequences_without_loss(batch)
        sequences = list[list[TokenInLoss]]()
        segment_ids, ids = get_segment_ids(batch), batch["input_ids"]
        for input_ids, labels, row_segments in zip(ids, batch["labels"], segment_ids, strict=True):
            for number in range(1, int(row_segments.max(initial=0)) + 1):
                tokens_read = input_ids[row_segments == number]
                next_labels = labels[row_segments == number]
                in_loss = next_labels != IGNORE_INDEX
                tokens, mask = [*tokens_read.tolist()], [False, *in_loss[:-1].tolist()]
                if in_loss[-1]:
                    tokens, mask = [*tokens, int(next_labels[-1])], [*mask, True]
                sequences.append(list(zip(tokens, mask, strict=True)))
        return sequences

    def count_non_padding_tokens(self, batch: Batch) -> int:
        """Count the tokens in a batch of samples that are not padding."""
        return int(np.count_nonzero(get_segment_ids(batch)))


def _causal_lm_data(config: RunConfig) -> CausalLMData:
    assert isinstance(config.data, CausalLMData)
    return config.data


def _prompt_target_separator(config: RunConfig) -> str:
    """Text between prompt and target: `data.separator`, by default that of the task."""
    separator = _causal_lm_data(config).separator
    return task_from_config(config.data).separator if separator is None else separator


CAUSAL_LM = CausalLM()


def compute_segment_starts(segment_ids: np.ndarray) -> np.ndarray:
    """Start offset of each token's sequence in its sample, int32 [n, length].

    Args:
        segment_ids: int32 [n, length], see `concatenate_packed_sequences`; padding is a text.
    """
    positions = np.arange(segment_ids.shape[1], dtype=np.int32)
    is_start = np.diff(segment_ids, axis=1, prepend=-1) != 0
    return np.maximum.accumulate(np.where(is_start, positions, 0), axis=1).astype(np.int32)


def truncate_conversations(
    texts: Sequence[TokenizedText],
    examples: Sequence[Example],
    limit: TokenLimit,
    on_long_target: OnLongTarget,
) -> tuple[list[TokenizedText], TruncationCounts]:
    """Truncate tokenized conversations on the right to the token limit.

    Raises:
        TooLongError: one is longer, and `on_long_target` is "error".
    """
    max_tokens = limit.tokens + 1  # the last token is predicted, but not read
    too_long = [i for i, text in enumerate(texts) if len(text.ids) > max_tokens]
    if too_long and on_long_target == "error":
        longest = max(too_long, key=lambda i: len(texts[i].ids))
        tokens, prompt = len(texts[longest].ids), examples[longest].prompt
        subject = (
            f"{len(too_long)} of {len(texts)} conversations are too long: the longest, which ends "
            f"{format_name(prompt[-60:])!r}, has {tokens} tokens"
        )
        raise limit.error(longest, subject, tokens - 1)
    dropped_indices = set(too_long) if on_long_target == "skip" else set[int]()
    truncated = [TokenizedText(*(part[:max_tokens] for part in text))
            for i, text in enumerate(texts) if i not in dropped_indices]  # fmt: skip
    sequences = [text for text in truncated if text.loss_mask.any()]
    dropped = len(texts) - len(sequences)
    return sequences, TruncationCounts(
        targets=0 if dropped_indices else len(too_long) - dropped, dropped=dropped
    )


class PairOrRollout(Protocol):
    """Interface of sequences that begin with the same prompt: a preference pair, or a rollout."""

    @property
    def sequences(self) -> tuple[TokenizedText, ...]: ...

    @property
    def example_index(self) -> int: ...


PairOrRolloutT = TypeVar("PairOrRolloutT", bound=PairOrRollout)


def truncate_prompts(
    items: Sequence[PairOrRolloutT],
    limit: TokenLimit,
    on_long_target: OnLongTarget,
    tokenizer: Tokenizer,
) -> tuple[list[PairOrRolloutT], TruncationCounts]:
    """Truncate the prompts of pairs or rollouts on the left until each fits into a sample.

    Both prompts of a pair lose the same tokens. The leading `<bos>` stays; those whose prompts are
    too short are dropped.

    Raises:
        TooLongError: one is longer, and `on_long_target` is "error".
    """
    sizes = [sum(len(text.ids) - 1 for text in item.sequences) for item in items]
    too_long = [i for i, size in enumerate(sizes) if size > limit.tokens]
    if too_long and on_long_target == "error":
        longest = max(too_long, key=sizes.__getitem__)
        both, together = (
            ("the two texts have", " together")
            if len(items[longest].sequences) > 1
            else ("the text has", "")
        )
        subject = f"{both} {sizes[longest]} tokens{together}"
        raise limit.error(items[longest].example_index, subject, sizes[longest])
    fitting_items, num_truncated = list[PairOrRolloutT](), 0
    for item, size in zip(items, sizes, strict=True):
        excess = -(-max(size - limit.tokens, 0) // len(item.sequences))
        num_fixed = tokenizer.count_leading_special_tokens(item.sequences[0].ids)
        removable = min(map(count_prompt_tokens, item.sequences)) - num_fixed
        if excess and (on_long_target == "skip" or excess >= removable):
            continue
        if excess:
            sequences = tuple(_truncate_left(text, excess, num_fixed) for text in item.sequences)
            item = replace(item, sequences=sequences)  # type: ignore[type-var]
            num_truncated += 1
        fitting_items.append(item)
    return fitting_items, TruncationCounts(
        prompts=num_truncated, dropped=len(items) - len(fitting_items)
    )


def _truncate_left(text: TokenizedText, num_removed: int, num_fixed: int) -> TokenizedText:
    """Remove `num_removed` tokens of a sequence, right after its first `num_fixed` ones."""
    size = len(text.ids)
    indices = left_truncated_indices(size, size - num_removed, num_fixed)
    return TokenizedText(text.ids[indices], text.loss_mask[indices])


def truncate_answers(
    tokenized: Sequence[TokenizedText],
    examples: Sequence[Example],
    limit: TokenLimit,
    on_long_target: OnLongTarget,
) -> tuple[list[TokenizedText], TruncationCounts]:
    """Truncate the answers of tokenized examples to the token limit.

    See `truncate_targets`.
    """
    answer_starts = [
        len(text.ids) - _count_trailing_loss_tokens(text.loss_mask) for text in tokenized
    ]
    indices, targets, truncation = truncate_targets(
        [text.ids[begin:] for text, begin in zip(tokenized, answer_starts, strict=True)],
        [example.target for example in examples],
        limit,
        on_long_target,
    )
    texts = []
    for i, target in zip(indices, targets, strict=True):
        loss_mask = tokenized[i].loss_mask[: answer_starts[i] + len(target)]
        texts.append(
            TokenizedText(np.append(tokenized[i].ids[: answer_starts[i]], target), loss_mask)
        )
    return texts, truncation


def _count_trailing_loss_tokens(loss_mask: np.ndarray) -> int:
    """Count the loss tokens at the end of a loss mask."""
    return len(loss_mask) - int(np.flatnonzero(~loss_mask).max(initial=-1)) - 1


def concatenate_to_stream(
    texts: Sequence[TokenizedText],
    answers_only: bool = False,
    truncation: TruncationCounts = NO_TRUNCATION,
) -> TokenStream:
    """Concatenate tokenized sequences into a token stream.

    Args:
        answers_only: labels are the tokens in the loss mask alone.
    """
    empty = np.zeros(0, np.int32)
    tokens = np.concatenate([empty, *(text.ids for text in texts)])
    targets = tokens
    if answers_only:
        loss_mask = np.concatenate([empty.astype(bool), *(text.loss_mask for text in texts)])
        targets = np.where(loss_mask, tokens, np.int32(IGNORE_INDEX))
    starts = np.cumsum([0, *(len(text.ids) for text in texts)])
    return TokenStream(tokens, targets, starts, truncation)
