"""Helpers of Horovod's launchers that programs and tests import."""
