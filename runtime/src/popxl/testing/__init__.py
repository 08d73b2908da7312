"""Helpers for tests of PopXL programs."""

from popxl.testing._dtypes import get_all_dtypes as get_all_dtypes
from popxl.testing._dtypes import get_all_int_dtypes as get_all_int_dtypes

__all__ = ["get_all_dtypes", "get_all_int_dtypes"]
