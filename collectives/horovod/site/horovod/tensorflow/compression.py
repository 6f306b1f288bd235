"""Compression."""

from collectives.compression import Compressor, FP16Compressor, NoneCompressor
from collectives.tensorflow import Compression

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
