"""T5: FLAN-T5 and T5 v1.1, T5 of 2019, and mT5, which settings tell apart."""
