"""Holds Horovod's path to `horovod.runner.common.util.env`."""
