"""Records of a run: metrics, loss curve, progress, and loggers for other tools."""
