"""Hides torch from processes that tests start: the requirements of users do not have it, and
transformers takes seconds to import it."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
