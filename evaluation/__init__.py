"""What a model is worth: answers to the validation split, and their metrics."""
