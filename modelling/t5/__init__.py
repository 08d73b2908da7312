"""T5: T5 v1.0 and v1.1, FLAN-T5, mT5 and ByT5."""
