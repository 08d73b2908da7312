"""Samples of encoder-decoder models: prompts for the encoder, targets for the decoder.

Batches are dicts of int32 arrays:
    input_ids, segments                [n, sequence_length], padded on the right; a segment
                                       is the number of a text in the sample, from 1
    decoder_input_ids, labels          [n, decoder_sequence_length]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from config.model import StartToken
from config.sections import RunConfig
from config.task import OnLongTarget
from data.examples import Example, Languages, TokenizedText, with_languages
from data.sample_format import (
    SampleFormat,
    TokenInLoss,
    length_multiple,
    pad_prompts,
    sequences_without_loss,
    truncate_prompt_ids,
)
from data.samples import (
    IGNORE_INDEX,
    Batch,
    Prompts,
    Samples,
    count_loss_tokens,
    get_segment_ids,
    hash_arrays,
    select_objective_inputs,
)
from data.truncation import (
    NO_TRUNCATION,
    TokenLimit,
    TooLongError,
    TruncationCounts,
    truncate_targets,
)

if TYPE_CHECKING:
    from data.preference_samples import PreferencePair, PreferenceSamples
    from data.rollout_samples import RolloutSamples, TokenizedRollout
    from data.token_sequences import DecodedSequences
    from data.tokenizer import Tokenizer

FIRST_TOKEN = 3
"""Smallest random token; the ids below are special tokens of most models."""

LENGTH_STD = 0.45
"""Standard deviation of the logarithm of a random prompt's length, if a mean is given."""


@dataclass(frozen=True)
class EncodedExamples:
    """Token ids of prompts and targets, which are padded only when a batch is taken.

    MNLI, padded to length 512, would take gigabytes.

    Attributes:
        tokens: int32, ids of all prompts, concatenated; each ends with `</s>`.
        offsets: int64 [n + 1], start of each prompt in `tokens`, and the end of the last.
        targets: int32 [n, decoder_sequence_length], padded with `IGNORE_INDEX`; of preferences [n,
            2, decoder_sequence_length], for `PackedExamples` alone.
        sequence_length: length that prompts are padded to.
        pad: id of the padding token.
        start: first token that the decoder reads.
        truncation: counts of truncated and dropped examples; prompts are truncated on the right,
            `</s>` stays.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray
    sequence_length: int
    pad: int
    truncation_counts: TruncationCounts = NO_TRUNCATION
    start: StartToken = None

    @property
    def digest(self) -> str:
        return hash_arrays(self.tokens, self.offsets, self.targets, self.sequence_length)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each prompt, int64 [n]."""
        return np.diff(self.offsets)

    def prompt_ids(self, index: int) -> np.ndarray:
        """Token ids of a prompt, without padding."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the examples at `indices`, in their order: arrays by name."""
        rows = np.asarray(indices, np.int64)
        input_ids = np.full((len(rows), self.sequence_length), self.pad, np.int32)
        segment_ids = np.zeros_like(input_ids)
        for i, example in enumerate(rows):
            ids = self.prompt_ids(example)
            input_ids[i, : len(ids)] = ids
            segment_ids[i, : len(ids)] = 1
        labels = self.targets[rows]
        return {
            "input_ids": input_ids,
            "segment_ids": segment_ids,
            "decoder_input_ids": shift_right(labels, self.pad, self.start),
            "labels": labels,
        }


@dataclass(frozen=True)
class PackedExamples:
    """Encoder-decoder examples, several packed into a sample.

    Attributes:
        examples: each by itself.
        samples: int64 [n, places], see `pack_sequences`.
    """

    examples: EncodedExamples
    samples: np.ndarray

    @classmethod
    def from_examples(cls, examples: EncodedExamples, max_per_sample: int) -> PackedExamples:
        """Pack up to `max_per_sample` examples into each sample."""
        from data.packing import pack_sequences

        lengths = np.diff(examples.offsets)
        return cls(examples, pack_sequences(lengths, examples.sequence_length, max_per_sample))

    @property
    def truncation_counts(self) -> TruncationCounts:
        """Counts of truncated and dropped examples."""
        return self.examples.truncation_counts

    @property
    def digest(self) -> str:
        digest = np.frombuffer(bytes.fromhex(self.examples.digest), np.uint8)
        return hash_arrays(digest, self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample's prompts together, int64 [n]."""
        return np.append(self.examples.lengths, 0)[self.samples].sum(axis=1)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: int32 arrays [n, length].

        `input_ids` and `segment_ids` are [n, sequence_length], the mask with the places' numbers
        as in `concatenate_packed_sequences`; `decoder_input_ids` and `labels` have a sequence for
        each target of each place, [n * places * answers, decoder_sequence_length].
        """
        from data.packing import EMPTY_SLOT, concatenate_packed_sequences

        encoded, samples = self.examples, self.samples[np.asarray(indices, np.int64)]
        input_ids, segment_ids = concatenate_packed_sequences(
            samples, encoded.prompt_ids, encoded.sequence_length, encoded.pad
        )
        example_indices = samples.reshape(-1)
        targets = encoded.targets.reshape(len(encoded), -1)[example_indices]
        labels = np.where(example_indices[:, None] == EMPTY_SLOT, IGNORE_INDEX, targets)
        labels = labels.reshape(-1, encoded.targets.shape[-1])
        return {
            "input_ids": input_ids,
            "segment_ids": segment_ids,
            "decoder_input_ids": shift_right(labels, encoded.pad, encoded.start),
            "labels": labels.astype(np.int32),
        }


@dataclass(frozen=True)
class Seq2Seq(SampleFormat):
    """Sample format of encoder-decoder models: prompts to the encoder, targets to the decoder."""

    name: str = "seq2seq"
    sample_tokenizer: str = "t5_tokenizer"
    output_field: str = "decoder_sequence_length"

    def output_length(self, config: RunConfig) -> int:
        """Maximum decoder tokens: an answer's, or those of the text that a classifier reads."""
        if config.training.head == "lm":
            return super().output_length(config)
        return config.model.sequence_length

    def tokenize(
        self, config: RunConfig, examples: Sequence[Example], tokenizer: Tokenizer
    ) -> Iterator[TokenizedText]:
        return encode_examples(examples, tokenizer)

    def make_samples(
        self,
        config: RunConfig,
        examples: Sequence[Example],
        tokenized: Sequence[TokenizedText],
        tokenizer: Tokenizer,
        for_eval: bool,
    ) -> Samples:
        max_per_sample = config.max_examples_per_sample
        encoded = truncate_examples(
            tokenized,
            examples,
            tokenizer,
            config.model.sequence_length,
            self.output_length(config),
            config.data.on_long_target,
            truncate_left=config.data.format == "conversational",
            start=config.model.training_start_token,
        )
        return (
            encoded
            if max_per_sample == 1
            else PackedExamples.from_examples(encoded, max_per_sample)
        )

    def encode_texts(
        self, examples: Sequence[Example], tokenizer: Tokenizer
    ) -> Iterator[np.ndarray]:
        return tokenizer.encode_side(((e.prompt, e.languages) for e in examples), False)

    def make_sequence_samples(
        self,
        config: RunConfig,
        sequences: Sequence[np.ndarray],
        slots: np.ndarray,
        tokenizer: Tokenizer,
        truncation: TruncationCounts,
    ) -> DecodedSequences:
        from data.token_sequences import DecodedSequences, TokenSequences

        encoded = TokenSequences(
            sequences,
            slots,
            config.model.sequence_length,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            "eos",
            truncation,
        )
        pad, start = tokenizer.pad_token_id, config.model.training_start_token
        return DecodedSequences(encoded, partial(shift_right, pad_token_id=pad, start=start))

    def make_pair_samples(
        self, config: RunConfig, pairs: Sequence[PreferencePair], tokenizer: Tokenizer
    ) -> PreferenceSamples:
        """Make samples in which one prompt has two targets, the chosen and the rejected answer."""
        from data.preference_samples import PreferenceSamples, make_kto_labels

        fitting_pairs, limit = list(pairs), self.output_length(config)
        if config.data.on_long_target == "skip":
            fitting_pairs = [pair for pair in pairs if _longest_target_length(pair) <= limit]
        try:
            answers = truncate_examples(
                [text for pair in fitting_pairs for text in pair.sequences],
                [example for pair in fitting_pairs for example in pair.examples],
                tokenizer,
                config.model.sequence_length,
                limit,
                config.data.on_long_target,
                truncate_left=config.data.format == "conversational",
            )
        except TooLongError as error:
            raise TooLongError(fitting_pairs[error.index // 2].example_index, str(error)) from error
        prompts = [answers.prompt_ids(2 * i) for i in range(len(fitting_pairs))]
        truncation = TruncationCounts(
            answers.truncation_counts.prompts // 2,
            answers.truncation_counts.targets,
            len(pairs) - len(fitting_pairs),
        )
        targets = answers.targets.reshape(-1, 2, limit)
        start = config.model.training_start_token
        pair_examples = EncodedExamples(
            *_concatenate_prompts(prompts),
            targets,
            answers.sequence_length,
            answers.pad,
            truncation,
            start,
        )
        packed = PackedExamples.from_examples(pair_examples, config.max_examples_per_sample)
        counts = np.count_nonzero(targets != IGNORE_INDEX, axis=2).astype(np.float32)
        return PreferenceSamples(packed, packed.samples, counts, make_kto_labels(fitting_pairs))

    def make_rollout_samples(
        self,
        config: RunConfig,
        rollouts: Sequence[TokenizedRollout],
        examples: Sequence[Example],
        tokenizer: Tokenizer,
    ) -> RolloutSamples:
        """Make samples in which a completion is the target of its prompt."""
        from data.rollout_samples import RolloutSamples, truncate_completions

        limit = TokenLimit(self.output_length(config), self.output_field)
        fitting, truncation = truncate_completions(rollouts, limit, config.data.on_long_target)
        encoded = truncate_examples(
            [rollout.sequences[0] for rollout in fitting],
            [rollout.example for rollout in fitting],
            tokenizer,
            config.model.sequence_length,
            limit.tokens,
            truncate_left=config.data.format == "conversational",
            start=config.model.training_start_token,
        )
        encoded = replace(encoded, truncation_counts=encoded.truncation_counts + truncation)
        packed = PackedExamples.from_examples(encoded, config.max_examples_per_sample)
        return RolloutSamples.from_rollouts(
            packed, packed.samples, fitting, examples, config.training
        )

    def fit_length_to_pairs(
        self, config: RunConfig, pairs: Sequence[PreferencePair], tokenizer: Tokenizer
    ) -> tuple[RunConfig, list[PreferencePair]]:
        longest = max(_longest_target_length(pair) for pair in pairs)
        return self.with_output_length(config, longest), list(pairs)

    def make_prompts(
        self,
        config: RunConfig,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        languages: Sequence[Languages] = (),
    ) -> tuple[RunConfig, Prompts]:
        """Tokenize prompts, truncated to `sequence_length` as in training.

        Prompts are truncated on the right, conversations on the left.
        """
        max_tokens = config.model.sequence_length
        multiple = max_tokens if config.max_examples_per_sample > 1 else length_multiple(config)
        is_chat = config.data.format == "conversational"
        rows = list(tokenizer.encode_side(with_languages(texts, languages), False))
        return pad_prompts(config, texts, rows, tokenizer, multiple, is_chat)

    def encode_targets(
        self,
        config: RunConfig,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        languages: Sequence[Languages] = (),
    ) -> list[np.ndarray]:
        return list(_encode_distinct(with_languages(texts, languages), tokenizer))

    def count_example_tokens(self, tokenized: TokenizedText) -> tuple[int, int]:
        """Count the tokens of an example's prompt and of its target."""
        prompt, target = _split_prompt_and_target(tokenized)
        return len(prompt), len(target)

    def count_predicted_positions(self, config: RunConfig) -> int:
        """Number of predicted tokens of a sample: one for each target position."""
        return (
            self.output_length(config) * config.max_examples_per_sample * config.answers_per_example
        )

    def make_random_samples(
        self, config: RunConfig, count: int, mean_tokens: float | None
    ) -> Samples:
        """Make samples of random tokens; without a mean length, examples have equal lengths."""
        model, max_per_sample = config.model, config.max_examples_per_sample
        prompt_length = (
            model.sequence_length if mean_tokens else model.sequence_length // max_per_sample
        )
        examples = make_random_examples(
            count * max_per_sample,
            model.vocab_size,
            prompt_length,
            self.output_length(config),
            model.seed,
            mean_tokens,
            special_ids=(model.eos_token_id, model.pad_token_id),
            target_vocab_size=model.output_vocab_size,
        )
        examples = replace(examples, start=model.training_start_token)
        if max_per_sample == 1:
            return examples
        packed = PackedExamples.from_examples(
            replace(examples, sequence_length=model.sequence_length), max_per_sample
        )
        indices = np.linspace(0, len(packed) - 1, count).astype(np.int64)  # full ones come first
        return replace(packed, samples=packed.samples[indices])

    def to_program_inputs(self, batch: Batch) -> dict[str, np.ndarray]:
        return {
            "input_ids": batch["input_ids"],
            "mask": get_segment_ids(batch),
            **select_objective_inputs(batch),
        }

    def sequences_with_loss_mask(self, batch: Batch) -> list[list[TokenInLoss]]:
        from data.preference_samples import NUM_LOSS_TOKENS

        if "labels" not in batch:
            return sequences_without_loss(batch)
        sequences = list[list[TokenInLoss]]()
        slots = len(batch["labels"]) // len(batch["input_ids"])
        for row, labels in enumerate(batch["labels"]):
            sample, slot = divmod(row, slots)
            slot //= batch[NUM_LOSS_TOKENS].shape[1] if NUM_LOSS_TOKENS in batch else 1
            is_segment = get_segment_ids(batch)[sample] == slot + 1
            prompt = [(int(token), False) for token in batch["input_ids"][sample][is_segment]]
            target = [(int(token), True) for token in labels[labels != IGNORE_INDEX]]
            if prompt or target:
                sequences.append([*prompt, *target])
        return sequences

    def count_non_padding_tokens(self, batch: Batch) -> int:
        """Count the tokens of a batch's prompts and targets, end tokens included."""
        tokens = int(np.count_nonzero(get_segment_ids(batch)))
        return tokens + (count_loss_tokens(batch) if "labels" in batch else 0)


SEQ2SEQ = Seq2Seq()


def encode_examples(examples: Sequence[Example], tokenizer: Tokenizer) -> Iterator[TokenizedText]:
    """Token ids of prompts followed by their targets, which are in the loss."""
    targets = _encode_distinct([(e.target, e.languages) for e in examples], tokenizer)
    prompts = tokenizer.encode_side(((e.prompt, e.languages) for e in examples), False)
    for prompt, target in zip(prompts, targets, strict=True):
        ids = np.append(prompt, target)
        yield TokenizedText(ids, np.arange(len(ids)) >= len(prompt))


def _split_prompt_and_target(tokenized: TokenizedText) -> tuple[np.ndarray, np.ndarray]:
    start = len(tokenized.ids) - int(np.count_nonzero(tokenized.loss_mask))
    return tokenized.ids[:start], tokenized.ids[start:]


def truncate_examples(
    tokenized: Sequence[TokenizedText],
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    sequence_length: int,
    decoder_sequence_length: int,
    on_long_target: OnLongTarget = "error",
    truncate_left: bool = False,
    start: StartToken = None,
) -> EncodedExamples:
    """Truncate prompts and targets to the encoder's and decoder's sequence lengths.

    Also counts the truncated and dropped examples.

    Args:
        tokenized: the examples' tokens, from `encode_examples`.
        on_long_target: what becomes of targets longer than `decoder_sequence_length`.
        truncate_left: prompts are truncated on the left, not on the right.
        start: see `EncodedExamples`.

    Raises:
        TooLongError: a target does not fit, and `on_long_target` is "error"; a target that was cut
            would train the model to say something else.
    """
    pairs = [_split_prompt_and_target(one) for one in tokenized]
    indices, targets, truncation = truncate_targets(
        [target for _, target in pairs],
        [example.target for example in examples],
        TokenLimit(decoder_sequence_length, "decoder_sequence_length"),
        on_long_target,
        tokenizer.num_end_tokens,
    )
    labels = np.full((len(indices), decoder_sequence_length), IGNORE_INDEX, np.int32)
    for row, ids in zip(labels, targets, strict=True):
        row[: len(ids)] = ids
    prompt_ids = [pairs[i][0] for i in indices]
    prompts, num_truncated = truncate_prompt_ids(
        prompt_ids, tokenizer, sequence_length, truncate_left
    )
    return EncodedExamples(
        *_concatenate_prompts(prompts),
        labels,
        sequence_length,
        tokenizer.pad_token_id,
        truncation + TruncationCounts(prompts=num_truncated),
        start,
    )


def _concatenate_prompts(prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate tokenized prompts; returns the token ids and each prompt's start offset."""
    starts = np.cumsum([0, *map(len, prompts)])
    return np.concatenate([np.zeros(0, np.int32), *prompts]), starts


def _longest_target_length(pair: PreferencePair) -> int:
    return max(len(_split_prompt_and_target(text)[1]) for text in pair.sequences)


def make_random_examples(
    count: int,
    vocab_size: int,
    sequence_length: int,
    decoder_sequence_length: int,
    seed: int,
    mean_tokens: float | None = None,
    *,
    special_ids: tuple[int, int] = (1, 0),
    target_vocab_size: int | None = None,
) -> EncodedExamples:
    """Make examples of random tokens, for benchmarks.

    Args:
        vocab_size: ids are below it.
        special_ids: tokens that end a text and fill up a sample, which are nowhere else.
        target_vocab_size: targets' ids are below it; None: `vocab_size`.
        sequence_length: prompts have at most so many tokens, `</s>` included.
        mean_tokens: of a prompt, lengths being log-normal; None: from half to all of
            `sequence_length`, all equally often.
        decoder_sequence_length: targets have from two tokens (one if there is no room) up to it.
    """
    rng, (eos, pad) = np.random.default_rng(seed), special_ids
    max_prompt, max_target = sequence_length, decoder_sequence_length

    def draw_tokens(end: int, shape: tuple[int, ...]) -> np.ndarray:
        ids = rng.integers(FIRST_TOKEN, end, shape, np.int32)
        return np.where(np.isin(ids, special_ids), FIRST_TOKEN, ids)

    if mean_tokens is None:
        lengths = rng.integers((max_prompt + 1) // 2, max_prompt, count, endpoint=True)
    else:
        lengths_drawn = rng.lognormal(np.log(mean_tokens) - LENGTH_STD**2 / 2, LENGTH_STD, count)
        lengths = np.clip(lengths_drawn.round(), 1, max_prompt).astype(np.int64)
    starts = np.cumsum([0, *lengths])
    tokens = draw_tokens(vocab_size, (int(starts[-1]),))
    tokens[starts[1:] - 1] = eos
    targets = draw_tokens(target_vocab_size or vocab_size, (count, max_target))
    tokens_left = rng.integers(
        min(2, max_target), max_target, (count, 1), endpoint=True
    ) - np.arange(max_target)
    targets = np.select([tokens_left > 1, tokens_left == 1], [targets, eos], IGNORE_INDEX).astype(
        np.int32
    )
    return EncodedExamples(tokens, starts, targets, max_prompt, pad)


def shift_right(labels: np.ndarray, pad_token_id: int, start: StartToken = None) -> np.ndarray:
    """Decoder inputs for labels: the labels shifted right by one, [n, length] → [n, length].

    The first is `start`; None: `pad_token_id`, as in T5. Ignored positions become `pad_token_id`.
    """
    tokens = np.where(labels == IGNORE_INDEX, pad_token_id, labels)
    if start == "last":  # mBART: the language's code, or the end token after it
        last = np.maximum(np.count_nonzero(tokens != pad_token_id, axis=1) - 1, 0)
        first = np.take_along_axis(tokens, last[:, None], 1)
    else:
        first = np.full_like(tokens[:, :1], pad_token_id if start is None else start)
    return np.concatenate([first, tokens[:, :-1]], axis=1)


def _encode_distinct(
    targets: Sequence[tuple[str, Languages]], tokenizer: Tokenizer
) -> list[np.ndarray]:
    """Token ids of target texts; equal texts, such as class labels, are tokenized once."""
    distinct = list(dict.fromkeys(targets))
    ids_by_target = dict(zip(distinct, tokenizer.encode_side(distinct, True), strict=True))
    return [ids_by_target[target] for target in targets]
