"""Compression."""

from collectives.tensorflow import Compression
from collectives.tensors.compression import Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
