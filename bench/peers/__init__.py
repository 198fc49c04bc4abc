"""Peers, measured side by side: each engine is a worker process that answers one JSON line with one JSON line."""
