"""What Horovod's launchers have in common."""
