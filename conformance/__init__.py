"""Scenarios, checks and records: whether two engines produce the same tokens, and the proof of it."""
