"""`make demo`: a small GPT, trained by weight streaming on text that every machine has."""
