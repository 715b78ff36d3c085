"""Events of a run, and the files written from them."""
