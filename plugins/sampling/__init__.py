"""Passes over one row of logits in C++: what the sampler does for each row that has no few candidates."""
