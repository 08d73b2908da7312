"""A configured model in a session: training, losses, generation."""
