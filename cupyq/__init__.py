"""Quantized matrix multiplication on NVIDIA GPUs for NumPy and CuPy."""
