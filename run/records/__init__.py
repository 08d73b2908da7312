"""The records of a run: metrics, curve, progress, and logs for other tools."""
