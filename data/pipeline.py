"""Data pipeline of a run: rows → examples → tokens → samples; data/loader.py makes batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import popdist
from config.errors import ConfigError
from config.model import ModelSection
from config.objectives import LABELED, ROW_PAIRS, WHOLE_TEXTS
from config.process_checks import check_same_on_all_processes, hash_json
from config.run import RANDOM
from config.sections import RunConfig
from config.values import split_names
from data.class_labels import ClassLabels
from data.data_cache import DataCache
from data.examples import NO_LANGUAGES, Corpus, Example, LanguageError, Languages, TokenizedText
from data.sample_format import SampleFormat
from data.samples import Prompts, Samples
from data.sources import DataError, is_large_source
from data.task import SAMPLE_FOLDER, Split, Task, task_from_config
from data.tokenizer import (
    REPEATED_SPACES,
    MissingEmbeddingRowError,
    Tokenizer,
    add_tokens,
    find_saved_tokenizer,
)
from data.truncation import ExampleError, TokenLimit, TooLongError, truncate_targets
from files.file_location import FileLocation
from files.formatting import format_name, format_names, format_value
from files.run_folder import RunFolder
from huggingface import hub
from terminal.screen import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from data.chat_template import ChatTemplate
    from data.data_warnings import DataWarnings
    from data.language_codes import LanguageCodes
    from data.mixture import MixtureSource
    from data.rollout_samples import RolloutSamples
    from data.token_cache import TokenizedSplits


SAMPLE_FORMAT_NAMES = ("seq2seq", "causal_lm")
"""Sample formats that worker processes support; see `data.tokenize_worker`."""

ROW_NOUNS = {
    "prompt_completion": "examples",
    "conversational": "conversations",
    "language_modeling": "parts of documents",
    "paired": "pairs",
    "unpaired": "answers",
    "labeled": "texts",
    "scored": "texts",
    "contrastive": "rows",
    "compared": "pairs",
    "rollout": "rollouts",
}
"""Nouns for the rows of each format, for messages."""

MAX_CHECKED_TARGETS = 2000
"""Number of targets, those with the most characters, that are tokenized to find the longest."""


@dataclass(frozen=True)
class Pipeline:
    """Converts the rows of a run's task to samples for training and prompts for evaluation.

    Attributes:
        user_config: the configuration as given.
        sample_format: format of the model's samples.
        data_cache: what this pipeline and others of the run share.
    """

    user_config: RunConfig
    sample_format: SampleFormat
    data_cache: DataCache = field(default_factory=DataCache, repr=False, compare=False)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The configured tokenizer; by default the tokenizer that suits the model and the task.

        Raises:
            UserError: it is unavailable, lacks what training needs, or has tokens that the model
                does not.
        """
        rows, (_, base) = self.user_config.model.vocab_size, self._tokenizer_name_and_tokenizer
        template = self._load_chat_template(base) if self.is_chat else None
        try:
            if template is not None and self.sample_format.trains_whole_chats:
                tokenizer = Tokenizer(base, rows, chat=True, eos_token_id=template.stop_token_id)
            else:
                tokenizer = Tokenizer(base, rows)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if tokenizer.required_vocab_size > rows and self.user_config.checkpoint.load in (
            None,
            RANDOM,
        ):
            raise ConfigError(
                f"the tokenizer has {tokenizer.required_vocab_size} tokens, but "
                f"{self.user_config.model.field_path('vocab_size')} is {rows}: set it to "
                f"{tokenizer.required_vocab_size} or more"
            )
        return tokenizer

    @cached_property
    def _tokenizer_name_and_tokenizer(self) -> tuple[str | None, PreTrainedTokenizerFast]:
        """Value of `data.tokenizer`, and the loaded tokenizer.

        A resumed run whose tokenizer is gone loads the copy in its run folder.
        """
        data, save = self.user_config.data, self.user_config.checkpoint.save
        default = self.user_config.published_tokenizer
        if data.dataset == "sample":
            default = str(SAMPLE_FOLDER / self.sample_format.sample_tokenizer)
        name = data.tokenizer or default
        try:
            return data.tokenizer, self._add_configured_tokens(self.data_cache.get_tokenizer(name))
        except hub.DataUnavailable:
            saved = None if save is None else find_saved_tokenizer(RunFolder(Path(save)))
            if saved is None or Path(name).exists():
                raise
            say(f"tokenizer {name} is gone: the run's copy in {saved} is used")
            return str(saved), self._add_configured_tokens(
                self.data_cache.get_tokenizer(str(saved))
            )

    def _add_configured_tokens(
        self, hf_tokenizer: PreTrainedTokenizerFast
    ) -> PreTrainedTokenizerFast:
        add_tokens(hf_tokenizer, split_names(self.user_config.model.add_tokens))
        return hf_tokenizer

    @cached_property
    def task(self) -> Task:
        """The training task that the configuration describes, with its data sources and templates.

        Raises:
            DataError: see `task_from_config`.
        """
        training = self.user_config.training
        task = task_from_config(self.user_config.data, training.row_type, training.negatives)
        if not self.source_pipelines or task.format is not None:
            return task
        formats = [source.task.row_format for source in self.source_pipelines.values()]
        return replace(task, format="conversational" if "conversational" in formats else formats[0])

    @cached_property
    def source_pipelines(self) -> Mapping[MixtureSource, Pipeline]:
        """Data pipelines of a mixture's data sources by name; empty without a mixture.

        Raises:
            UserError: the mixture cannot be read.
        """
        if not self.user_config.data.is_mixture:
            return {}
        from data.mixture import read_mixture

        return {
            source: replace(
                self,
                user_config=replace(self.user_config, data=source.data),
                data_cache=self.data_cache.sharing_tokenizers(source.name),
            )
            for source in read_mixture(self.user_config.data)
        }

    @property
    def is_chat(self) -> bool:
        """True if the task's examples are conversations.

        Raises:
            UserError: only the data can tell, and cannot be read.
        """
        return self.task.row_format == "conversational"

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Chat template for prompts at inference, which renders as transformers does.

        Raises:
            UserError: there is none, or it cannot be read.
        """
        return self._load_chat_template(self.tokenizer.hf_tokenizer, fix_date=False)

    def _load_chat_template(
        self, hf_tokenizer: PreTrainedTokenizerFast, fix_date: bool = True
    ) -> ChatTemplate:
        from data.chat_template import load_chat_template

        data = self.user_config.data
        resolve_loss_on = self.sample_format.resolve_loss_on(
            replace(self.user_config, data=replace(data, format="conversational"))
        )
        return load_chat_template(
            hf_tokenizer, data.chat_template, data.chat_variables, resolve_loss_on, fix_date
        )

    @cached_property
    def config(self) -> RunConfig:
        """Configuration completed with the tokenizer, its special tokens and the row format."""
        end, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        data = replace(self._resolved_config.data, tokenizer=self._tokenizer_name_and_tokenizer[0])
        model = replace(self.user_config.model, eos_token_id=end, pad_token_id=pad)
        if (codes := self.tokenizer.language_codes) and (
            language := self.task.languages.fixed_languages[1]
        ):
            model = replace(model, **_answer_start_fields(model, codes, language))
        config = replace(self.user_config, model=model, data=data)
        return self._with_classes(config) if self.task.row_type == "labeled" else config

    def _with_classes(self, config: RunConfig) -> RunConfig:
        """Complete a configuration with the classes of the data.

        Raises:
            ConfigError: nothing says them.
        """
        if self.source_pipelines and config.data.class_labels is None:
            raise ConfigError(
                "the classes of a mixture are those that are named: give --data.class_labels"
            )
        names, training, lists = self.task.labels or (), config.training, self.task.labels_are_lists
        if training.multi_label is None:
            training = replace(training, multi_label=lists)
        elif lists and not training.multi_label:
            raise ConfigError(
                "training.multi_label is false, but the labels of the data are lists: leave it out"
            )
        data = replace(config.data, class_labels=",".join(names))
        return replace(config, training=training, data=data)

    @cached_property
    def _resolved_config(self) -> RunConfig:
        """Configuration with the settings that only the data determine, such as the row format."""
        row_format = self.task.row_format
        if row_format == "prompt_completion":
            first_pipeline = next(
                (p for p in self.source_pipelines.values() if p.task.row_format == row_format), self
            )
            return self.sample_format.with_data_settings(
                self.user_config, first_pipeline.task.separator
            )
        return replace(self.user_config, data=replace(self.user_config.data, format=row_format))

    def read_corpus(self, split: Split) -> Corpus:
        """Read the examples of a data split, with prompts as the model reads them.

        Raises:
            UserError: the data are unavailable, or do not fit the task.
        """
        return self.data_cache.get_corpus(
            split, self._memory_cache_key, lambda: self._read_splits_of_source(split)
        )

    def read_tokenized_corpus(self, split: Split) -> Corpus:
        """Read and tokenize the examples of a data split.

        Raises as `read_corpus` and `tokenizer`.
        """
        corpus = self.read_corpus(split)
        if corpus.tokens is None:
            corpus = self.tokenize_corpus(corpus)
            self.data_cache.replace_corpus(split, corpus)
        return corpus

    def tokenize_corpus(self, corpus: Corpus) -> Corpus:
        """Add the token ids and loss masks to the examples of a corpus."""
        if corpus.tokens is not None:
            return corpus
        try:
            return replace(corpus, tokens=self.tokenize_examples(corpus.examples))
        except LanguageError as error:
            if error.languages in (None, self.task.languages.fixed_languages):
                raise
            rows = (i for i, e in enumerate(corpus.examples) if e.languages == error.languages)
            raise ConfigError(f"{corpus.row_location(next(rows))}: {error}") from error
        except MissingEmbeddingRowError as error:
            texts = ("".join(example[:2]) for example in corpus.examples)
            index = next((i for i, text in enumerate(texts) if error.token in text), None)
            location = None if index is None else corpus.row_location(index)
            raise error if location is None else ConfigError(f"{location}: {error}") from error

    def tokenize_examples(self, examples: Sequence[Example]) -> list[TokenizedText]:
        """Tokenize examples to token ids and loss masks; labeled texts have no loss tokens."""
        if self.task.row_type == "contrastive":
            from data.text_samples import tokenize_texts

            texts = [example.target for example in examples]
            tokens = tokenize_texts(texts, self._resolved_config, self.tokenizer)
            return [TokenizedText(ids, np.zeros(len(ids), bool)) for ids in tokens]
        if self.task.row_type in WHOLE_TEXTS:
            encoded = self.sample_format.encode_texts(examples, self.tokenizer)
            if self.task.row_type == "compared" and not self.tokenizer.chat:  # as TRL
                encoded = map(self.tokenizer.append_eos, encoded)
            return [TokenizedText(ids, np.zeros(len(ids), bool)) for ids in encoded]
        if self.task.row_type == "rollout":
            return self._tokenize_rollout_texts(examples)
        tokenized = self.sample_format.tokenize(self._resolved_config, examples, self.tokenizer)
        return list(tokenized)

    def _tokenize_rollout_texts(self, examples: Sequence[Example]) -> list[TokenizedText]:
        """Tokenize the prompts and completions of rollouts, except those whose rows have tokens."""
        from data.rollout_samples import tokenize_from_ids

        known = [tokenize_from_ids(example) for example in examples]
        unknown = [e for e, tokens in zip(examples, known, strict=True) if tokens is None]
        tokenized = self.sample_format.tokenize(self._resolved_config, unknown, self.tokenizer)
        return [next(tokenized) if tokens is None else tokens for tokens in known]

    def render_example(self, example: Example) -> Example:
        """Convert an example of the task to the text that the model reads.

        Conversations are rendered already.
        """
        return (
            example
            if self.is_chat or self.task.row_type in WHOLE_TEXTS
            else self.sample_format.render_example(self._resolved_config, example)
        )

    @cached_property
    def _memory_cache_key(self) -> tuple[object, ...]:
        """Key of a split's examples in the cache of this process."""
        return self.cache_key, id(self._tokenizer_name_and_tokenizer[1]) if self.is_chat else None

    @property
    def cache_key(self) -> tuple[object, ...]:
        """Cache key: all data settings besides the tokenizer that determine the examples."""
        data = self.user_config.data
        open_ = ("format", "tokenizer", "loss_on", "separator")  # which a run fills in
        settings = {f.name: getattr(data, f.name) for f in fields(data) if f.name not in open_}
        if not self.is_chat:
            return (
                settings,
                self.task.row_format,
                self.sample_format.render_prompt(self._resolved_config, ""),
            )
        template = self._load_chat_template(self._tokenizer_name_and_tokenizer[1])
        return settings, template.loss, template.cache_key

    def _read_splits_of_source(self, split: Split) -> dict[Split, Corpus]:
        task = self.task
        if task.row_format == "language_modeling" and not self.sample_format.trains_whole_chats:
            raise DataError(
                "plain text is for models with a decoder alone, but this one reads a prompt and "
                "writes a target: give rows that have both, or another --model"
            )
        if task.row_type and task.row_format == "language_modeling":
            raise DataError(
                f"{self.user_config.training.objective} learns from rows of its own: leave out "
                "--data.format language_modeling"
            )
        if task.row_type == "contrastive" and not task.is_user_data:
            raise DataError(
                f"the task {task.name} has no contrastive rows: give --data.train FILE with rows "
                "of anchor and positive"
            )
        large = is_large_source(task.source_of_split(split)) and not task.row_type
        if large and self.sample_format.name in SAMPLE_FORMAT_NAMES:
            from data.token_cache import load_or_tokenize

            if tokenized := load_or_tokenize(self, split):
                return self._corpora_from_tokenized(split, tokenized)
        if not self.is_chat:
            notes = self.new_data_warnings() if task.is_user_data else None
            corpora = task.read_splits(split, data_warnings=notes).items()
            if notes is not None:
                self._print_data_warnings(notes)
            return {name: corpus.map_examples(self.render_example) for name, corpus in corpora}
        chat = self.training_template()
        splits = task.read_splits(split, chat, chat.warnings)
        self._check_conversations(split, chat, splits)
        return splits

    def _corpora_from_tokenized(
        self, split: Split, tokenized: TokenizedSplits
    ) -> dict[Split, Corpus]:
        """Convert tokenized data of a split, read from the token cache, to a corpus by split."""
        from data.data_warnings import DataWarnings

        splits = {name: corpus for name, (corpus, _) in tokenized.items()}
        self.task.check_examples_left(split, splits)
        if self.is_chat:
            template = self.training_template()
            template.warnings = DataWarnings.from_dict(tokenized[split][1].get_dict("notes"))
            self._check_conversations(split, template, splits)
            self.task.check_validation_split(splits)
            return splits
        self._print_data_warnings(DataWarnings.from_dict(tokenized[split][1].get_dict("notes")))
        if not any(corpus.examples for corpus in splits.values()):
            name = self.task.source_of_split(split).name
            raise DataError(f"{name} holds no examples: give data that has some")
        self.task.check_validation_split(splits)
        return splits

    def training_template(self) -> ChatTemplate:
        """Chat template for training conversations."""
        template = self._load_chat_template(self.tokenizer.hf_tokenizer)
        template.warnings = self.new_data_warnings()
        return template

    def new_data_warnings(self) -> DataWarnings:
        """Create an empty collection of warnings about rows of the task's data."""
        from data.data_warnings import DataWarnings

        if not self.task.is_user_data:
            return DataWarnings()
        from data.special_tokens import special_token_texts

        return DataWarnings(special_token_texts(self.tokenizer.hf_tokenizer))

    def _print_data_warnings(self, notes: DataWarnings) -> None:
        """Print the warnings about data rows, once for all splits together."""
        for note in notes.format_lines(self.data_cache.warnings):
            say(note)

    def _check_conversations(
        self, split: Split, template: ChatTemplate, splits: Mapping[Split, Corpus]
    ) -> None:
        """Print warnings about a split's conversations; raise DataError if none is left."""
        self._print_data_warnings(template.warnings)
        if template.stop_token is None and self.sample_format.trains_whole_chats:
            say(
                "warning: the chat template ends answers with no special token: the model will not "
                "learn where to stop"
            )
        if not splits[split].examples:
            raise DataError(f"the data for {split} hold no conversation to learn from")

    def check_processes_agree(self, corpus: Corpus) -> None:
        """Check that all processes have read the same examples with the same tokenizer.

        Raises:
            ConfigError: they have not.
        """
        if popdist.getNumInstances() > 1:
            check_same_on_all_processes(
                {
                    "number of examples": len(corpus.examples),
                    "digest of the examples": corpus.digest
                    or hash_json(map(repr, corpus.examples)),
                    "digest of the tokenizer": hash_json(self.tokenizer.identity_values),
                }
            )

    def make_training_samples(self, source_name: str = "") -> Samples:
        """Make the training samples; prints counts of dropped and truncated examples.

        Args:
            source_name: name of the source in a mixture.

        Raises:
            UserError: the data or the tokenizer are unavailable, or do not fit the model.
        """
        if self.source_pipelines:
            return self._make_mixture_samples()
        corpus = self.read_tokenized_corpus("train")
        self.check_processes_agree(corpus)
        self._check_target_lengths(corpus)
        samples = self.make_samples(corpus)
        notes = [f"{source_name}{': ' if source_name else ''}{len(samples)} training samples"]
        row_type, answers = self.task.row_type, self.task.examples_per_row
        rows = len(corpus.examples) // answers
        if len(samples) != rows:
            notes[0] += f" of {rows} {ROW_NOUNS[row_type or self.task.row_format]}"
        if row_type in ROW_PAIRS:
            from data.preference_samples import count_equal_pairs

            if num_equal := count_equal_pairs(corpus.examples):
                notes.append(f"{num_equal} pairs of equal answers, which teach no preference")
        if self.task.validation_fraction is not None:
            num_held_out = len(self.read_corpus("validation").examples) // answers
            notes.append(
                f"{num_held_out} held out by --data.validation {self.task.validation_fraction:g}"
            )
        say(
            ", ".join(
                [
                    *notes,
                    *corpus.dropped_row_messages,
                    *samples.truncation_counts.format_messages(self.config.model.sequence_length),
                ]
            )
        )
        if self.task.labels is not None and self.task.user_labels is None:
            say(f"the data name the labels: {format_name(', '.join(self.task.labels), 150)}")
        self._warn_of_lost_characters(corpus)
        self._warn_of_unused_languages()
        for hint in self._prompt_format_hints(corpus.examples):
            say(hint)
        self.data_cache.drop_corpus("train")
        return samples

    def _make_mixture_samples(self) -> Samples:
        from data.mixture import MixtureSamples

        self._check_target_lengths(Corpus([]))
        samples_by_source = [
            pipeline.make_training_samples(format_name(source.name))
            for source, pipeline in self.source_pipelines.items()
        ]
        mixed = MixtureSamples.mix_by_weights(
            samples_by_source, [source.weight for source in self.source_pipelines]
        )
        say(
            f"a mixture of {len(mixed)} samples: "
            + ", ".join(
                f"{format_name(source.name)} {count} ({count / len(samples):.3g} times each)"
                for source, samples, count in zip(
                    self.source_pipelines, samples_by_source, mixed.samples_per_epoch, strict=True
                )
            )
        )
        return mixed

    def _check_target_lengths(self, training_corpus: Corpus) -> None:
        """Check before training that the longest targets of both splits fit.

        Raises:
            ConfigError: one is longer than the model writes.
        """
        data = self.user_config.data
        if (
            data.validation is None
            or data.on_long_target != "error"
            or self.task.row_format != "prompt_completion"
        ):
            return
        if self.task.row_type:
            return
        splits = [training_corpus, self.read_corpus("validation")]
        targets = [
            (example.target, corpus.row_location(i), example)
            for corpus in splits
            for i, example in enumerate(corpus.examples)
        ]
        longest_targets = sorted(targets, key=lambda target: len(target[0]))[-MAX_CHECKED_TARGETS:]
        texts = [text for text, *_ in longest_targets]
        languages = [example.languages for _, _, example in longest_targets]
        tokens = self.sample_format.encode_targets(
            self._resolved_config, texts, self.tokenizer, languages
        )
        try:
            truncate_targets(
                tokens, texts, self.sample_format.target_token_limit(self.config), "error"
            )
        except TooLongError as error:
            raise _located_error(error, longest_targets[error.index][1]) from error

    def make_samples(self, corpus: Corpus, for_eval: bool = False) -> Samples:
        """Convert examples to samples; `for_eval` as in `SampleFormat.make_samples`.

        Raises:
            ConfigError: one does not fit the model.
        """
        examples, tokens = corpus.examples, self.tokenize_corpus(corpus).tokens or ()
        row_type = self.task.row_type
        try:
            if row_type in LABELED:
                from data.labeled_samples import make_labeled_samples

                return make_labeled_samples(
                    self.sample_format, self.config, examples, tokens, self.tokenizer
                )
            if row_type == "contrastive":
                from data.text_samples import make_text_samples

                texts, num_texts = [text.ids for text in tokens], self.task.examples_per_row
                return make_text_samples(texts, num_texts, self.config, self.tokenizer)
            if row_type == "compared":
                from data.labeled_samples import make_reward_samples

                return make_reward_samples(
                    self.sample_format, self.config, examples, tokens, self.tokenizer
                )
            if row_type == "rollout":
                return self._make_rollout_samples(examples, tokens)
            if row_type is not None:
                from data.preference_samples import PreferencePair

                pairs = PreferencePair.from_examples(examples, tokens, row_type == "unpaired")
                return self.sample_format.make_pair_samples(self.config, pairs, self.tokenizer)
            return self.sample_format.make_samples(
                self.config, examples, tokens, self.tokenizer, for_eval
            )
        except ExampleError as error:
            raise _located_error(error, corpus.row_location(error.index)) from error

    def _make_rollout_samples(
        self, examples: Sequence[Example], tokens: Sequence[TokenizedText]
    ) -> RolloutSamples:
        from data.rollout_samples import tokenize_rollouts

        config, tokenizer = self.config, self.tokenizer
        rollouts = tokenize_rollouts(
            examples,
            tokens,
            tokenizer.eos_token_id,
            config.model.vocab_size,
            config.training.masks_truncated_completions,
        )
        return self.sample_format.make_rollout_samples(config, rollouts, examples, tokenizer)

    def encode_labels(self, label_names: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each class label when it is the answer, int32 [n] each."""
        languages = [self.task.languages.fixed_languages] * len(label_names)
        return self.sample_format.encode_targets(
            self._resolved_config, label_names, self.tokenizer, languages
        )

    def make_prompts(
        self, texts: Sequence[str], languages: Sequence[Languages] | None = None
    ) -> tuple[RunConfig, Prompts]:
        """Tokenize prompts; returns them with a configuration that fits their lengths.

        At most `SampleFormat.max_new_tokens` tokens are written.

        Args:
            languages: of each prompt and its answer; None: those of the configuration.

        Raises:
            UserError: the tokenizer needs other languages.
        """
        if languages is None:
            languages = [self.task.languages.fixed_languages] * len(texts)
        config, prompts = self.sample_format.make_prompts(
            self.config, texts, self.tokenizer, languages
        )
        if (codes := self.tokenizer.language_codes) is not None:
            targets = [str(codes.with_defaults(pair).target) for pair in languages]
            config, prompts = _with_answer_starts(config, prompts, codes, targets)
        return self.sample_format.with_output_length(
            config, self.sample_format.max_new_tokens(self.user_config)
        ), prompts

    def make_eval_prompts(self, corpus: Corpus) -> tuple[RunConfig, Prompts]:
        """Tokenize the prompts of a validation split for generation.

        Returns them with a configuration that fits their lengths.

        No more tokens are written than the longest label has, unless `generation.max_tokens` asks
        for them.

        Raises:
            UserError: a right answer is longer than what is written, unless `data.on_long_target`
                allows it.
        """
        languages = [example.languages for example in corpus.examples]
        config, prompts = self.make_prompts(
            [example.prompt for example in corpus.examples], languages
        )
        names = self.task.labels
        max_new_tokens = self.sample_format.max_new_tokens(self.user_config)
        texts: Sequence[str] = [example.target for example in corpus.examples]
        if names is not None:  # with the white space of the targets
            labels, distinct_targets = ClassLabels(names), dict.fromkeys(texts)
            texts = [
                *dict.fromkeys(
                    labels.replace_label(text, name) for text in distinct_targets for name in names
                )
            ]
            languages = [self.task.languages.fixed_languages] * len(texts)
        tokens = self.sample_format.encode_targets(
            self._resolved_config, texts, self.tokenizer, languages
        )
        limit = TokenLimit(
            max_new_tokens,
            self.sample_format.output_field,
            self.user_config.model.max_position_embeddings,
        )
        # A reference too long to be written only lowers the score, if the user accepts that.
        try:
            truncate_targets(tokens, texts, limit, self.user_config.data.on_long_target)
        except TooLongError as error:
            location = None if names else corpus.row_location(error.index)
            raise _located_error(error, location) from error
        if names and self.user_config.generation.max_tokens is None:
            max_new_tokens = min(max_new_tokens, max(map(len, tokens)))
        return self.sample_format.with_output_length(config, max_new_tokens), prompts

    def _prompt_format_hints(self, examples: Sequence[Example]) -> Iterator[str]:
        """Hints for the user about suspicious prompts and targets, such as no separator."""
        data = self.user_config.data
        if (
            data.train is None
            or self.task.row_format != "prompt_completion"
            or self.task.row_type in WHOLE_TEXTS
            or examples[0].has_token_ids
            or not self.sample_format.trains_whole_chats
        ):
            return
        if (
            data.prompt is None
            and data.format is None
            and self.tokenizer.hf_tokenizer.chat_template
        ):
            yield (
                "the tokenizer has a chat template: --data.format conversational asks the model "
                "through it"
            )
        example = examples[0]
        prompt_end, target_start = example.prompt[-1:], example.target[:1]
        if (
            not self.sample_format.render_prompt(self._resolved_config, "")
            and prompt_end
            and target_start
            and not (prompt_end.isspace() or target_start.isspace())
        ):
            excerpt = format_value(f"{example.prompt[-20:]}{example.target[:20]}")
            yield (
                f"prompts and targets are joined as they are, such as {excerpt}: "
                "--data.separator ' ' puts a space between them"
            )

    def _warn_of_unused_languages(self) -> None:
        """Say that a tokenizer without language codes does not tell the model the languages."""
        codes_in_sources = getattr(self.tokenizer.hf_tokenizer, "supported_language_codes", None)
        has_codes = bool(codes_in_sources) or self.tokenizer.language_codes is not None
        if self.task.languages.fixed_languages != NO_LANGUAGES and not has_codes:
            say(
                "the tokenizer has no language codes: data.source_language and "
                "data.target_language name columns, and the directions of BLEU and chrF, alone"
            )

    def _warn_of_lost_characters(self, corpus: Corpus) -> None:
        """Warn of characters in the examples that the tokenizer cannot represent."""
        characters = corpus.characters
        texts = [characters or ""]
        if characters is None:
            texts = [text for example in corpus.examples for text in example[:2]]
        unknown, changed = self.tokenizer.find_lost_characters(texts)
        if (
            any(REPEATED_SPACES in text for text in texts)
            and not self.tokenizer.preserves_repeated_spaces
        ):
            say(
                "warning: the tokenizer does not keep spaces that follow each other, as in "
                "indentation: the model reads and writes one"
            )
        if unknown:
            say(
                f"warning: the tokenizer does not know {_format_characters(unknown)}: the model "
                "will not read or write it"
            )
        if changed:
            say(
                f"the tokenizer reads {_format_characters(changed)} as small letters or without "
                "accents: the model will not write them"
            )


def _answer_start_fields(
    model: ModelSection, codes: LanguageCodes, language: str
) -> dict[str, Any]:
    """Fields of a model's configuration that make all answers begin in a language."""
    token = codes.token_id(language)
    fields: dict[str, Any] = {"forced_bos_token_id": token}
    if codes.are_suffixes:
        fields = {"forced_bos_token_id": None, "decoder_start_token_id": token}
    return {name: value for name, value in fields.items() if hasattr(model, name)}


def _with_answer_starts(
    config: RunConfig, prompts: Prompts, codes: LanguageCodes, languages: Sequence[str]
) -> tuple[RunConfig, Prompts]:
    """Make each answer begin in its language, by config fields or by one more token per prompt.

    Raises:
        ConfigError: answers start with codes that differ, but the decoder with one token.
    """
    distinct = list(dict.fromkeys(languages))
    if len(distinct) == 1 and hasattr(config.model, "forced_bos_token_id"):
        model = replace(config.model, **_answer_start_fields(config.model, codes, distinct[0]))
        return replace(config, model=model), prompts
    if codes.are_suffixes and len(distinct) > 1:
        raise ConfigError(
            f"answers in {format_names(distinct)} are asked for, but all answers of this model "
            "start with the same language: give rows of one, or --target_language"
        )
    tokens = np.asarray([codes.token_id(language) for language in languages], np.int32)
    return config, replace(prompts, forced_tokens=tokens)


def _format_characters(characters: Sequence[str]) -> str:
    """Format the first few of a list of characters for a message."""
    return ", ".join(map(repr, characters[:5])) + (" and others" if len(characters) > 5 else "")


def _located_error(error: ExampleError, location: FileLocation | None) -> ConfigError:
    """Create the error for an example that does not fit, with the location of its row."""
    return ConfigError(str(error) if location is None else f"{location}: {error}")
