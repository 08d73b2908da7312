"""Text generation for all families: the loop over positions, and the choice of tokens.

A family says once how its models generate (see `Generator`); two executors run that.
"""

from modelling.generation.beam import Beam as Beam
from modelling.generation.caches import put as put
from modelling.generation.generator import Caches as Caches
from modelling.generation.generator import Executor as Executor
from modelling.generation.generator import Generator as Generator
from modelling.generation.generator import LayerInputs as LayerInputs
from modelling.generation.generator import Prompts as Prompts
from modelling.generation.generator import Value as Value
from modelling.generation.greedy import Greedy as Greedy
from modelling.generation.loop import Prefilled as Prefilled
from modelling.generation.loop import write_tokens as write_tokens
from modelling.generation.program import GenerationProgram as GenerationProgram
from modelling.generation.program import build_generation as build_generation
from modelling.generation.prompts import last_words as last_words
from modelling.generation.prompts import what_was_read as what_was_read
from modelling.generation.resident import ResidentModel as ResidentModel
from modelling.generation.rules import Rules as Rules
from modelling.generation.sampling import Sampling as Sampling
from modelling.generation.search import Search as Search
from modelling.generation.search import SearchContext as SearchContext
from modelling.generation.search import SpecialTokens as SpecialTokens
from modelling.generation.search import Strategy as Strategy
from modelling.generation.stops import Stops as Stops
from modelling.generation.streamed import build_streamed as build_streamed
