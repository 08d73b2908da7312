"""Benchmark the fine-tuning of a configured model on generated data.

python3 finetuning.py --config tiny
"""

from __future__ import annotations

import sys

from sessions.training import FineTuning as FineTuning

if __name__ == "__main__":
    from benchmarks.finetuning import main

    sys.exit(main())
