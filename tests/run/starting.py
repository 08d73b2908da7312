"""What processes that train do first."""

WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None\n"
"""Where torch is not found, transformers does not load it: half of the time of a start."""
