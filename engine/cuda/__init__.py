"""The CUDA backend: one kernel per fused op, compiled at run time, with the bits of the NumPy backend.

Nothing here is imported unless the backend is asked for, so the engine runs without CuPy.
"""
