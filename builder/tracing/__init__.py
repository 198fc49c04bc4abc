"""The parts of `builder.trace`: which models can be traced, the capture through torch, and what is checked after."""
