"""llama.cpp at one pinned build: fetched, built, run under a deadline, its effective settings read back."""
