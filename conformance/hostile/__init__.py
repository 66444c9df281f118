"""Hostile inputs: model files that are wrong in one way each, and what the engine and llama.cpp say to them."""
