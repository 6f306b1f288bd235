"""``collectivesrun``: start a program on N ranks, and end all of them when one fails.

    collectivesrun -np 4 python train.py
    python -m collectives.launch -np 4 -H host1:2,host2:2 python train.py

    cli                          the program: from its arguments to the exit code
    options                      the table of options, settings and keys
    command_line, config_file    parse the options, and the same settings from a YAML file
    rank_environment             the ranks' environment variables for them
    hosts                        the hosts of a job, as told or as a batch system has allotted them
    mpirun                       ranks by MPI: find it, build its command line (pure), start and end it
    agents, ssh, agent           ranks without MPI: start an agent on each host, by ssh; the agent itself
    batch_system                 the same by srun or blaunch, in a job of a batch system
    job                          start, watch and end the ranks of either
    rank                         the process before each rank that forwards its output and its end
    output, screen               parse the ranks' output, and show it line by line, tagged
    records                      collect failure records and find the first failure
    shared_memory_cleanup        remove shared memory that dead ranks leave behind
    api, run_function            run(function) from within a program, and its part on each rank
    report                       --check-build, --show-plan
    timeline_summary, timeline_report    statistics of a timeline, and the HTML page of it

``mpirun -np 4 python train.py``, ``srun -n 4 python train.py`` and ``torchrun --nproc-per-node 4 train.py`` start the
same ranks without it.
"""

from collectives.launch.api import run
from collectives.launch.cli import main

__all__ = ["main", "run"]
