"""``horovod.spark.common.store`` is `collectives.spark.store`."""

from collectives.spark.store import FilesystemStore as FilesystemStore
from collectives.spark.store import LocalStore as LocalStore
from collectives.spark.store import Store as Store
