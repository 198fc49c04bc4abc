"""Runs a fused graph operator by operator on torch: what passes are measured by, and the way onto any torch device."""
