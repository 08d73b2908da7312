"""A toy family: each token alone predicts the next."""
