"""The decoding strategy (greedy, sampling or beam search) that a configuration selects."""

from __future__ import annotations

from config.sections import RunConfig
from data.samples import Prompts
from data.tokenizer import Tokenizer
from modelling.generation.beam_search import BeamSearchStrategy
from modelling.generation.forced_tokens import ForcedFirstTokens
from modelling.generation.greedy_search import GreedyStrategy
from modelling.generation.logits_processors import LogitsProcessors
from modelling.generation.sampling import SamplingStrategy
from modelling.generation.search import DecodingStrategy
from modelling.generation.stop_strings import StopStringAutomaton


def strategy_from_config(
    config: RunConfig, tokenizer: Tokenizer | None = None, prompts: Prompts | None = None
) -> DecodingStrategy:
    """Build the decoding strategy that the config section `generation` selects.

    Args:
        tokenizer: the model's tokenizer; None: without stop strings, which need it.
        prompts: the prompts to answer, some of which have forced tokens.
    """
    strategy = _search_strategy(config, tokenizer)
    return strategy if prompts is None else with_forced_tokens(strategy, prompts)


def with_forced_tokens(strategy: DecodingStrategy, prompts: Prompts) -> DecodingStrategy:
    """Begin each answer with its prompt's forced token, if prompts have some."""
    if prompts.forced_tokens is None:
        return strategy
    return ForcedFirstTokens(strategy, prompts.forced_tokens)


def _search_strategy(config: RunConfig, tokenizer: Tokenizer | None) -> DecodingStrategy:
    settings = config.generation
    processors = LogitsProcessors(
        settings.repetition_penalty,
        settings.no_repeat_ngram_size,
        _build_stop_automaton(config, tokenizer),
    )
    match settings.search:
        case "sample" if settings.temperature > 0:
            return SamplingStrategy(
                settings.seed, settings.temperature, settings.top_k, settings.top_p, processors
            )
        case "beam":
            return BeamSearchStrategy(settings.num_beams, settings.length_penalty, processors)
    return GreedyStrategy(processors)


def _build_stop_automaton(
    config: RunConfig, tokenizer: Tokenizer | None
) -> StopStringAutomaton | None:
    texts = config.generation.parse_stop_strings()
    if not texts or tokenizer is None:
        return None
    return StopStringAutomaton.from_stop_strings(
        texts, tokenizer.token_bytes(config.model.output_vocab_size)
    )
