"""Text generation for all families: the loop over positions, and the choice of tokens.

A family brings the graphs that encode a prompt and that read one token (see `Generator`).
"""

from modelling.generation.beam import Beam as Beam
from modelling.generation.cached import CachedModel as CachedModel
from modelling.generation.cached import Decode as Decode
from modelling.generation.cached import Prefill as Prefill
from modelling.generation.cached import resident_of as resident_of
from modelling.generation.caches import Slots as Slots
from modelling.generation.caches import put as put
from modelling.generation.greedy import Greedy as Greedy
from modelling.generation.loop import Start as Start
from modelling.generation.loop import bind_step as bind_step
from modelling.generation.loop import decode as decode
from modelling.generation.program import GenerationProgram as GenerationProgram
from modelling.generation.program import Generator as Generator
from modelling.generation.program import build_generation as build_generation
from modelling.generation.prompts import last_words as last_words
from modelling.generation.prompts import what_was_read as what_was_read
from modelling.generation.rows import repeated as repeated
from modelling.generation.rules import Rules as Rules
from modelling.generation.sampling import Sampling as Sampling
from modelling.generation.search import Search as Search
from modelling.generation.search import SearchContext as SearchContext
from modelling.generation.search import SpecialTokens as SpecialTokens
from modelling.generation.search import Strategy as Strategy
from modelling.generation.stack import Inputs as Inputs
from modelling.generation.stack import Stack as Stack
from modelling.generation.step import Step as Step
from modelling.generation.stops import Stops as Stops
