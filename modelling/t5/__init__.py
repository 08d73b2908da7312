"""T5: T5 v1.0 and v1.1, FLAN-T5, FLAN-UL2, mT5, umT5 and ByT5."""
