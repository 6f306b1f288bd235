"""``python -m collectives.horovod`` prints the folder for PYTHONPATH."""

from collectives.horovod import FOLDER

print(FOLDER)
