"""The search strategy that a configuration names."""

from __future__ import annotations

from config.sections import RunConfig
from data.tokenizer import Tokenizer
from modelling.generation.beam_search import Beam
from modelling.generation.greedy_search import Greedy
from modelling.generation.logits_processors import LogitsProcessors
from modelling.generation.sampling import Sampling
from modelling.generation.search import DecodingStrategy
from modelling.generation.stop_strings import StopStringAutomaton


def strategy_from_config(config: RunConfig, tokenizer: Tokenizer | None = None) -> DecodingStrategy:
    """What `generation` of a configuration asks for.

    Args:
        tokenizer: of the model; None: stop texts, which alone need it, are left out.
    """
    given = config.generation
    processors = LogitsProcessors(
        given.repetition_penalty, given.no_repeat_ngram_size, _stop_strings(config, tokenizer)
    )
    match given.search:
        case "sample" if given.temperature > 0:
            return Sampling(given.seed, given.temperature, given.top_k, given.top_p, processors)
        case "beam":
            return Beam(given.beams, given.length_penalty, processors)
    return Greedy(processors)


def _stop_strings(config: RunConfig, tokenizer: Tokenizer | None) -> StopStringAutomaton | None:
    texts = config.generation.stops()
    if not texts or tokenizer is None:
        return None
    return StopStringAutomaton.from_texts(texts, tokenizer.printed(config.model.vocab_size))
