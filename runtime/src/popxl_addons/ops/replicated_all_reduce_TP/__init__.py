"""All-reduces at the borders of a tensor-parallel region."""

from popxl_addons.ops.replicated_all_reduce_TP.replicated_all_reduce_TP import (
    replicated_all_reduce as replicated_all_reduce,
)
from popxl_addons.ops.replicated_all_reduce_TP.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs as replicated_all_reduce_identical_grad_inputs,
)
from popxl_addons.ops.replicated_all_reduce_TP.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_inputs as replicated_all_reduce_identical_inputs,
)
