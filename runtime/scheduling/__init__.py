"""The scheduler's parts: who waits and whose turn it is, which blocks a sequence holds, how long a step takes,
what a step does."""
