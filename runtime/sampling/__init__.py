"""The sampler's parts: passes over a row of logits, and the choice of what may be sampled from it."""
