"""What a run leaves and shows: metrics, curve, progress, and logs of other tools."""
