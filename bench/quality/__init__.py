"""`plancast quality`: how good an engine is, as numbers: perplexity, divergence from a reference, small tasks."""
