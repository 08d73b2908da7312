"""Constrained evaluation of classification: every label is scored as the answer.

The score of a label is the sum of the log-probabilities of its tokens after the prompt, as `acc` of
lm-evaluation-harness has it. Where one label begins another, the end of the answer counts too: else
the shorter one could never be less likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from config.errors import ConfigError
from config.sections import RunConfig
from data.class_labels import ClassLabels
from data.examples import Corpus, Example, TextSpan
from data.packing import EMPTY_SLOT
from data.pipeline import Pipeline
from data.preference_samples import PreferencePair, PreferenceSamples
from data.tokenizer import TokenizedText
from files.formatting import format_name

OBJECTIVE = "cpo"
"""Objective whose program returns log-probabilities of both answers of a pair without a reference.
"""


@dataclass(frozen=True)
class LabelCandidates:
    """Samples that pair every prompt with every class label as its answer, to score the labels.

    Attributes:
        config: of the program that computes log-probabilities.
        samples: two texts in a pair, the labels of an example one after the other.
        labels: in their order.
        cut: examples whose prompt lost a part.
    """

    config: RunConfig
    samples: PreferenceSamples
    labels: ClassLabels
    cut: int

    @classmethod
    def from_examples(
        cls, data: Pipeline, corpus: Corpus, label_names: Sequence[str]
    ) -> LabelCandidates:
        """Build the samples of all examples with each class label.

        Raises:
            ConfigError: the tokenizer or the chat template does not tell labels apart.
        """
        labels = ClassLabels(tuple(label_names))
        _check_labels_differ(data, labels)
        paired_names = [*label_names, *label_names[-1:]] if len(label_names) % 2 else label_names
        examples = [
            _replace_target_label(e, labels, name) for e in corpus.examples for name in paired_names
        ]
        tokens = data.tokenize_examples(examples)
        if not (labels.has_label_prefixing_another or data.tokenizer.chat):  # a chat's spans say it
            tokens = [TokenizedText(text.ids[:-1], text.loss_mask[:-1]) for text in tokens]
        config = data.config.with_values(
            {"training.objective": OBJECTIVE} | _disabled_packing_fields(data.config)
        )
        all_pairs = PreferencePair.from_examples(examples, tokens, False)
        config, pairs = data.sample_format.fit_length_to_pairs(config, all_pairs, data.tokenizer)
        samples = data.sample_format.make_pair_samples(config, pairs, data.tokenizer)
        is_shorter = (
            len(pair.sequences[0].ids) < len(full_pair.sequences[0].ids)
            for pair, full_pair in zip(pairs, all_pairs, strict=True)
        )
        num_truncated = sum(is_shorter) + samples.truncation_counts.prompts
        return cls(config, samples, labels, 2 * num_truncated // len(paired_names))

    def logps_by_example(self, logps: np.ndarray) -> np.ndarray:
        """Log-probabilities of the class labels, float32 [examples, labels].

        Args:
            logps: of the texts of the samples, float32 [samples, places, 2].
        """
        is_used = self.samples.pair_indices != EMPTY_SLOT
        pair_scores = np.empty((len(self.samples.num_loss_tokens), 2), np.float32)
        pair_scores[self.samples.pair_indices[is_used]] = logps[is_used]
        count = len(self.labels.names)
        return pair_scores.reshape(-1, count + count % 2)[:, :count]


def _disabled_packing_fields(config: RunConfig) -> dict[str, bool]:
    return {"data.packing": False} if hasattr(config.data, "packing") else {}


def _check_labels_differ(data: Pipeline, labels: ClassLabels) -> None:
    name_of_ids: dict[tuple[int, ...], str] = {}
    for name, ids in zip(labels.names, data.encode_labels(labels.names), strict=True):
        previous = name_of_ids.setdefault(tuple(ids.tolist()), name)
        if previous != name:
            raise ConfigError(
                f"the tokenizer gives the labels {format_name(previous)} and {format_name(name)} "
                "the same tokens: name them with letters that it knows"
            )


def _replace_target_label(example: Example, labels: ClassLabels, label_name: str) -> Example:
    """Replace the class label in an example's target."""
    relabeled = example.with_target(labels.replace_label(example.target, label_name))
    if not example.rendered_spans:
        return relabeled
    if example.rendered_spans == example.with_joined_target().rendered_spans:
        return relabeled.with_joined_target()
    return example.with_target(relabeled.target, _replace_last_label(example, labels, label_name))


def _replace_last_label(
    example: Example, labels: ClassLabels, label_name: str
) -> tuple[TextSpan, ...]:
    """Replace the class label in the last answer of a rendered conversation.

    Only the label is in the loss; if a label is a prefix of another, the rest of its span too.
    """
    spans, target = example.rendered_spans, example.target
    matching = (i for i, span in enumerate(spans) if span.in_loss and target in span.text)
    last_index = max(matching, default=-1)
    if last_index < 0:
        raise ConfigError(
            f"the chat template does not write the answer {format_name(target)} as it is: leave "
            "out --eval.constrained"
        )
    leading, _, trailing = spans[last_index].text.partition(target)
    thought, _, space = labels.split_at_label(target)
    prompt_text = "".join(span.text for span in spans[:last_index]) + leading + thought
    following_spans = [TextSpan(span.text, False) for span in spans[last_index + 1 :]]
    end = TextSpan(space + trailing, labels.has_label_prefixing_another)
    return (TextSpan(prompt_text, False), TextSpan(label_name, True), end, *following_spans)
