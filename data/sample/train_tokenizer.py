"""Train the T5-style tokenizer of the sample corpus.

SentencePiece fits a unigram language model (Kudo, "Subword Regularization", 2018) to the training
split; the pieces and their scores are then stored as a `tokenizers` pipeline like T5's, which
`transformers.AutoTokenizer` loads from the folder without a network: `<pad>` = 0, `</s>` = 1,
`<unk>` = 2, pieces, and sentinel tokens at the end, `<extra_id_0>` last. Encoding appends `</s>`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from data.examples import Example
from data.task import NLI_LABELS, TASKS

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
MIN_SENTINELS = 32
VOCAB_MULTIPLE = 64
"""The vocabulary is padded with sentinels to a multiple of this, so that tensor parallelism up to
64 shards it evenly."""
MAX_PIECES = 512
"""Maximum number of pieces, more than the corpus fills."""
ASCII = "".join(map(chr, range(33, 127)))


def make_training_lines(examples: Sequence[Example]) -> Iterator[str]:
    """Texts to train on: prompts and answers, then every word with various neighbors.

    SentencePiece takes its candidates from a suffix tree, where a word that is always followed by
    the same character ("hypothesis" by ":") is no node and would be cut into pieces.
    """
    text = [example.prompt for example in examples] + list(NLI_LABELS)
    yield from text
    vocabulary = sorted({word for line in text for word in re.findall(r"\w+", line)})
    for word in vocabulary:
        yield from [word, f"{word}.", f"{word},", f"{word}a"] * 5


def train_unigram_pieces(lines: Iterator[str]) -> list[tuple[str, float]]:
    """Train a unigram model; returns its pieces with log-probabilities.

    Special pieces come first; the result is deterministic.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="unigram",
        vocab_size=MAX_PIECES,
        hard_vocab_limit=False,
        required_chars=ASCII,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece=PAD,
        eos_piece=EOS,
        unk_piece=UNK,
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in ids]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build T5's tokenizer pipeline around the unigram pieces of the sample's training split."""
    examples = TASKS["sample"].read_corpus("train").examples
    pieces = train_unigram_pieces(make_training_lines(examples))
    count = MIN_SENTINELS + -(len(pieces) + MIN_SENTINELS) % VOCAB_MULTIPLE
    sentinels = [f"<extra_id_{index}>" for index in reversed(range(count))]
    vocab = pieces + [(sentinel, 0.0) for sentinel in sentinels]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=2))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, 1)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in (PAD, EOS, UNK, *sentinels)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens=sentinels,
        clean_up_tokenization_spaces=False,
    )
