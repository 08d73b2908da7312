"""In-place updates of variables: accumulators and optimizers."""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from popxl.ops.var_updates.accumulate import accumulate_ as accumulate_
    from popxl.ops.var_updates.accumulate import accumulate_maximum_ as accumulate_maximum_
    from popxl.ops.var_updates.accumulate import accumulate_mean_ as accumulate_mean_
    from popxl.ops.var_updates.accumulate import (
        accumulate_moving_average_ as accumulate_moving_average_,
    )
    from popxl.ops.var_updates.accumulate import (
        accumulate_moving_average_square_ as accumulate_moving_average_square_,
    )
    from popxl.ops.var_updates.accumulate import accumulate_square_ as accumulate_square_
    from popxl.ops.var_updates.accumulate import accumulator_scale_ as accumulator_scale_
    from popxl.ops.var_updates.accumulate import accumulator_zero_ as accumulator_zero_
    from popxl.ops.var_updates.accumulate import sparse_accumulate_ as sparse_accumulate_
    from popxl.ops.var_updates.adam_updater import adam_updater as adam_updater
    from popxl.ops.var_updates.adam_updater import adamax_updater as adamax_updater
    from popxl.ops.var_updates.adam_updater import lamb_updater as lamb_updater
    from popxl.ops.var_updates.adam_var_update import adam_var_update as adam_var_update
    from popxl.ops.var_updates.copy_var_update import copy_var_update_ as copy_var_update_
else:
    lazy_exports(__name__)
