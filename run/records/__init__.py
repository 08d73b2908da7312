"""Records of a run: metrics, loss curve, progress, and loggers of other tools."""
