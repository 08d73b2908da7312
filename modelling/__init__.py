"""Models as programs of phases."""
