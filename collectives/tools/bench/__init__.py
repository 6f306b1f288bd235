"""Benchmarks with nccl-tests' flags and columns: ``collectives bench allreduce -np 2 -b 64K -e 64M -f 4``.

    command              start the ranks; ``python -m collectives.tools.bench`` is one of them
    run                  a rank, from the command line to the exit status
    cli                  the flags
    definitions          the six collectives, each a `collective.Collective`
    contest, measure     who takes part in a row, and the stopwatch
    ranks, device        the ranks of a run, and where their buffers lie
    values               test values, and the result that they must give
    table, report, plot  what is printed, the JSON file, the picture
    progress             a bar on the terminal

`benchmarks/` of the repository measures the engine in more ways, and beside other libraries.
"""
