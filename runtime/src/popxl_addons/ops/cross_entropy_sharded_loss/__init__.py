"""Cross entropy over a sharded vocabulary."""

from popxl_addons.ops.cross_entropy_sharded_loss.cross_entropy_sharded_loss import (
    cross_entropy_sharded_loss as cross_entropy_sharded_loss,
)
