"""Cache of tokenizers and examples, shared by the data pipelines of a run.

A run makes several: to choose lengths, to train, to evaluate, to export. Their configurations
differ in what data do not depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from data.examples import Corpus
from data.task import Split
from huggingface import hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class DataCache:
    """Cache of tokenizers by name, and of each split's examples until they are tokenized.

    Attributes:
        warnings: warnings that were printed; see `DataWarnings.format_lines`.
    """

    def __init__(self) -> None:
        self._tokenizers: dict[str, PreTrainedTokenizerFast] = {}
        self._corpora: dict[Split, tuple[object, Corpus]] = {}
        self._source_caches: dict[str, DataCache] = {}
        self.warnings: set[tuple[str, str]] = set()

    def get_tokenizer(self, name: str) -> PreTrainedTokenizerFast:
        """Load a tokenizer, or return the one loaded before. Raises as `hub.load_tokenizer`."""
        if name not in self._tokenizers:
            self._tokenizers[name] = hub.load_tokenizer(name)
        return self._tokenizers[name]

    def sharing_tokenizers(self, name: str) -> DataCache:
        """Create a cache for one data source of a mixture; it shares this cache's tokenizers."""
        if name not in self._source_caches:
            self._source_caches[name] = DataCache()
            self._source_caches[name]._tokenizers = self._tokenizers
        return self._source_caches[name]

    def get_corpus(
        self, split: Split, settings: object, read_splits: Callable[[], Mapping[Split, Corpus]]
    ) -> Corpus:
        """Read the examples of a split, once per data settings.

        Args:
            settings: the settings that determine the examples; other ones read them again.
            read_splits: reads them, and perhaps those of another split with them.
        """
        cached = self._corpora.get(split)
        if cached is None or cached[0] != settings:
            self._corpora |= {name: (settings, corpus) for name, corpus in read_splits().items()}
        return self._corpora[split][1]

    def replace_corpus(self, split: Split, corpus: Corpus) -> None:
        """Replace the cached examples of a split, such as by tokenized ones."""
        self._corpora[split] = (self._corpora[split][0], corpus)

    def drop_corpus(self, split: Split) -> None:
        """Remove the cached examples of a split to free memory."""
        self._corpora.pop(split, None)
