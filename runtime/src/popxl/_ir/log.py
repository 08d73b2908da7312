"""The runtime's logger; warnings reach standard error even without a logging setup."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("popxl")


class _StderrFallbackHandler(logging.Handler):
    """Prints records to standard error that no logging handler of the user's program prints."""

    def emit(self, record: logging.LogRecord) -> None:
        streams = [getattr(h, "stream", None) for h in logging.getLogger().handlers]
        if sys.stderr not in streams and sys.__stderr__ not in streams:
            print(f"{record.levelname}: popxl: {record.getMessage()}", file=sys.stderr)


logger.addHandler(_StderrFallbackHandler(logging.WARNING))
