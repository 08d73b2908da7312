"""A model's weights: one table, read in both directions.

`row` says how a variable is made of weights, `table` has all rows of a model; `variables` finds the
weights in a program's variables, `hf_files` and `mxfp4` in Hugging Face's files; `optimizer_state`
converts what a checkpoint has of them; `trained` and `lora` say what is trained.
"""

from modelling.weights.row import LowRank as LowRank
from modelling.weights.row import Weight as Weight
from modelling.weights.row import WeightRow as WeightRow
from modelling.weights.row import WeightsError as WeightsError
from modelling.weights.table import FP8 as FP8
from modelling.weights.table import GROUP as GROUP
from modelling.weights.table import Variables as Variables
from modelling.weights.table import WeightTable as WeightTable
from modelling.weights.variables import OPTIMIZER as OPTIMIZER
from modelling.weights.variables import HeldParts as HeldParts
from modelling.weights.variables import nbytes_of as nbytes_of
from modelling.weights.variables import without_optimizer as without_optimizer
