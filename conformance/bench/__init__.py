"""Speed: engine and llama.cpp side by side, every sample kept, a verdict that may also be "undecided"."""
