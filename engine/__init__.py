"""Inference engine for Qwen3.5-class hybrid models: NumPy reference and CUDA backends with the same bits."""
