"""Text generation for all model families: prefill, KV caches, decoding loop and search.

A family describes once how its models generate (`Generator`); two executors run that description.
"""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from modelling.generation.beam_search import BeamSearchStrategy as BeamSearchStrategy
    from modelling.generation.decode_loop import InitialDecodeState as InitialDecodeState
    from modelling.generation.decode_loop import generate_tokens as generate_tokens
    from modelling.generation.generator import Caches as Caches
    from modelling.generation.generator import Generator as Generator
    from modelling.generation.generator import LayerExecutor as LayerExecutor
    from modelling.generation.generator import LayerInputs as LayerInputs
    from modelling.generation.generator import MicroBatchTensor as MicroBatchTensor
    from modelling.generation.generator import PreparedPrompts as PreparedPrompts
    from modelling.generation.greedy_search import GreedyStrategy as GreedyStrategy
    from modelling.generation.kv_cache import update_cache as update_cache
    from modelling.generation.logits_processors import LogitsProcessors as LogitsProcessors
    from modelling.generation.prompts import last_tokens as last_tokens
    from modelling.generation.prompts import pad_left as pad_left
    from modelling.generation.resident_executor import ResidentModel as ResidentModel
    from modelling.generation.resident_program import GenerationProgram as GenerationProgram
    from modelling.generation.resident_program import (
        build_resident_program as build_resident_program,
    )
    from modelling.generation.sampling import SamplingStrategy as SamplingStrategy
    from modelling.generation.search import DecodingStrategy as DecodingStrategy
    from modelling.generation.search import Search as Search
    from modelling.generation.search import SearchContext as SearchContext
    from modelling.generation.search import SpecialTokenIds as SpecialTokenIds
    from modelling.generation.stop_strings import StopStringAutomaton as StopStringAutomaton
    from modelling.generation.streamed_program import (
        build_streamed_program as build_streamed_program,
    )
else:
    lazy_exports(__name__)
