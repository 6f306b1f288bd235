"""Compression."""

from collectives.tensors.compression import Compressor, FP16Compressor, NoneCompressor
from collectives.torch import Compression

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
