"""``collectivesrun``: start a program on N ranks, and end all of them when one fails.

    collectivesrun -np 4 python train.py
    python -m collectives.launch -np 4 -H host1:2,host2:2 python train.py

    cli       the command line                     hosts     "host1:2,host2:2" and host files
    options   which option sets which setting      config_file    the same from a YAML file
    mpi       which MPI's mpirun there is          command   options -> the command of that MPI (pure)
    job       starts it, watches it, ends it       rank      stands before each rank and sees how it ends
    output    tells the ranks' output apart        screen    shows it, line by line, tagged
    records   what failed first                    leftovers shared memory that dead ranks leave
    api       run(function) from within a program  call      what a rank of it does
    report    --check-build, --show-plan

``mpirun -np 4 python train.py`` and ``srun --mpi=pmix -n 4 python train.py`` start the same ranks without it.
"""

from collectives.launch.api import run
from collectives.launch.cli import main

__all__ = ["main", "run"]
