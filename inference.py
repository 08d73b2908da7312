"""Benchmark the generation of a configured model on generated data.

python3 inference.py --config tiny
"""

from __future__ import annotations

import sys

from sessions.generating import Inference as Inference

if __name__ == "__main__":
    from benchmarks.inference import main

    sys.exit(main())
