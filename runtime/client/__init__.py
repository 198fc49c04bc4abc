"""The client side of an engine: the process it starts, watches and replaces, and the streams that it feeds."""
