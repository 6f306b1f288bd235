"""Modules that Horovod's launchers share."""
