"""Benchmark the fine-tuning of a configured model on generated data.

python3 finetuning.py --config tiny
"""

from __future__ import annotations

import sys

from benchmarks.finetuning import main

if __name__ == "__main__":
    sys.exit(main())
