"""The NumPy backend: the golden model of the numerics contract."""
