"""``horovod``, which is collectives: its modules are those of `collectives.horovod`."""

from collectives.horovod import FOLDER, VERSION, choose_gradients

__path__ = [str(FOLDER / "horovod")]
__version__ = VERSION

from horovod.runner import run

choose_gradients()

__all__ = ["__version__", "run"]
