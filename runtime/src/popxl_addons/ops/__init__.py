"""Composite ops, built on popxl's."""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from popxl_addons.ops.cross_entropy import cross_entropy as cross_entropy
    from popxl_addons.ops.cross_entropy import cross_entropy_with_grad as cross_entropy_with_grad
    from popxl_addons.ops.fp8_amax_scale import fp8_amax_scale as fp8_amax_scale
    from popxl_addons.ops.saturate import saturate as saturate
    from popxl_addons.ops.streams import host_load as host_load
    from popxl_addons.ops.streams import host_store as host_store
else:
    lazy_exports(__name__)
