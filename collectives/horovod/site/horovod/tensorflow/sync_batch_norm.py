"""The synchronised batch normalisation of `collectives.tensorflow`."""

from collectives.tensorflow import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
