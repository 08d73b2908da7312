"""Benchmark the generation of a configured model on generated data.

python3 inference.py --config tiny
"""

from __future__ import annotations

import sys

from benchmarks.inference import main

if __name__ == "__main__":
    sys.exit(main())
