"""``horovod``: collectives under its names, or Horovod itself where installed; see `collectives.horovod`."""

from collectives.horovod import VERSION, choose_gradients, hand_over

if not hand_over():
    choose_gradients()
    from horovod.runner import run  # type: ignore[import-not-found]

__version__ = VERSION
__all__ = ["__version__", "run"]
