"""Fuzzing of everything that reads what others wrote: model files, vocabularies, scenarios, records, token ids."""
