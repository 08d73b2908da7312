"""The search strategy that a configuration names."""

from __future__ import annotations

from config.sections import RunConfig
from data.tokenizer import Tokenizer
from modelling.generation.beam_search import Beam
from modelling.generation.greedy_search import Greedy
from modelling.generation.logits_processors import Rules
from modelling.generation.sampling import Sampling
from modelling.generation.search import Strategy
from modelling.generation.stop_strings import Stops


def strategy_of(config: RunConfig, tokenizer: Tokenizer | None = None) -> Strategy:
    """What `generation` of a configuration asks for.

    Args:
        tokenizer: of the model; None: stop texts, which alone need it, are left out.
    """
    given = config.generation
    rules = Rules(given.repetition_penalty, given.no_repeat_ngram_size, _stops(config, tokenizer))
    match given.search:
        case "sample" if given.temperature > 0:
            return Sampling(given.seed, given.temperature, given.top_k, given.top_p, rules)
        case "beam":
            return Beam(given.beams, given.length_penalty, rules)
    return Greedy(rules)


def _stops(config: RunConfig, tokenizer: Tokenizer | None) -> Stops | None:
    texts = config.generation.stops()
    if not texts or tokenizer is None:
        return None
    return Stops.of(texts, tokenizer.printed(config.model.vocab_size))
