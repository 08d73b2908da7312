"""The search strategy that a configuration names."""

from __future__ import annotations

from config.sections import RunConfig
from modelling.generation.beam import Beam
from modelling.generation.greedy import Greedy
from modelling.generation.sampling import Sampling
from modelling.generation.search import Strategy


def strategy_of(config: RunConfig) -> Strategy:
    """What `generation` of a configuration asks for."""
    given = config.generation
    match given.search:
        case "greedy":
            return Greedy()
        case "sample":
            return Sampling(given.seed, given.temperature, given.top_k, given.top_p)
        case "beam":
            return Beam(given.beams, given.length_penalty)
