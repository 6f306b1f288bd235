"""``horovod.spark.common``: the store of estimators."""
