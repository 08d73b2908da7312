"""Sessions: compiled programs of a configured model for training, losses and generation."""
