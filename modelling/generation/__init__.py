"""Text generation for all families: the loop over positions, and the choice of tokens.

A family says once how its models generate (see `Generator`); two executors run that.
"""

from modelling.generation.beam_search import Beam as Beam
from modelling.generation.decode_loop import Prefilled as Prefilled
from modelling.generation.decode_loop import write_tokens as write_tokens
from modelling.generation.generator import Caches as Caches
from modelling.generation.generator import Executor as Executor
from modelling.generation.generator import Generator as Generator
from modelling.generation.generator import LayerInputs as LayerInputs
from modelling.generation.generator import Prompts as Prompts
from modelling.generation.generator import Value as Value
from modelling.generation.greedy_search import Greedy as Greedy
from modelling.generation.kv_cache import put as put
from modelling.generation.logits_processors import Rules as Rules
from modelling.generation.prompts import last_words as last_words
from modelling.generation.prompts import what_was_read as what_was_read
from modelling.generation.resident_executor import ResidentModel as ResidentModel
from modelling.generation.resident_program import GenerationProgram as GenerationProgram
from modelling.generation.resident_program import build_generation as build_generation
from modelling.generation.sampling import Sampling as Sampling
from modelling.generation.search import Search as Search
from modelling.generation.search import SearchContext as SearchContext
from modelling.generation.search import SpecialTokens as SpecialTokens
from modelling.generation.search import Strategy as Strategy
from modelling.generation.stop_strings import Stops as Stops
from modelling.generation.streamed_program import build_streamed as build_streamed
