"""Few rounds instead of few bytes: recursive doubling and the binomial tree, for small tensors between hosts.

Recursive doubling, eight ranks: in round k, rank r exchanges everything with the rank whose number differs in bit k.

    round 0   0-1  2-3  4-5  6-7
    round 1   0-2  1-3  4-6  5-7
    round 2   0-4  1-5  2-6  3-7

After log2 N rounds of S bytes every rank has the result. If N is not a power of two, the ranks beyond the largest power
P send their value to a partner first and receive the result from it last, which makes log2 P + 2 rounds.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19 (2005).
"""

from __future__ import annotations

from collectives.schedules.algorithm import Algorithm, Hosts, Tuned
from collectives.schedules.schedule import Round, Schedule, copy, receive, reduce, send


def recursive_doubling(rank: int, size: int) -> Schedule:
    """All-reduce of one chunk, for any number of ranks.

    Both partners of an exchange combine the same two values, and a op b is b op a to the bit; so after every round the
    members of a group of 2^k ranks agree, and in the end all do.
    """
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    rounds: list[Round] = []
    if extra:
        if rank >= power:
            rounds.append((send(rank - power, 0),))
        else:
            rounds.append((reduce(rank + power, 0),) if rank < extra else ())
    for bit in range(power.bit_length() - 1):
        partner, group = rank ^ (1 << bit), 1 << bit
        first = partner & -group  # of the partner's group, some of whose members have an extra rank's value, too
        count = group + min(max(extra - first, 0), group)
        rounds.append((send(partner, 0), reduce(partner, 0, count=count)) if rank < power else ())
    if extra:
        if rank >= power:
            rounds.append((receive(rank - power, 0),))
        else:
            rounds.append((send(rank + power, 0),) if rank < extra else ())
    return Schedule("allreduce", "recursive-doubling", rank, size, 1, tuple(rounds) or ((copy(rank, 0),),))


def broadcast(rank: int, size: int, root: int) -> Schedule:
    """Broadcast down a binomial tree: in round k the 2^k ranks that have the chunk send it to the next 2^k ranks.

        root 0    round 0: 0 -> 1     round 1: 0 -> 2, 1 -> 3     round 2: 0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7

    ceil(log2 N) rounds of S bytes.
    """
    place = (rank - root) % size
    rounds: list[Round] = [(copy(rank, 0),) if place == 0 else ()] if size == 1 else []
    reach = 1
    while reach < size:
        steps = [copy(rank, 0)] if place == 0 and reach == 1 else []
        if place < reach and place + reach < size:
            steps.append(send((rank + reach) % size, 0))
        elif reach <= place < 2 * reach:
            steps.append(receive((rank - reach) % size, 0))
        rounds.append(tuple(steps))
        reach *= 2
    return Schedule("broadcast", "recursive-doubling", rank, size, 1, tuple(rounds))


def _of_a_power_of_two(hosts: Hosts) -> bool:
    """Round k then combines the subtrees of 2^k ranks."""
    size = sum(map(len, hosts))
    return size & (size - 1) == 0


ALGORITHMS = (
    Algorithm(
        "allreduce",
        "recursive-doubling",
        recursive_doubling,
        one_chunk=True,
        versioned=True,
        on_gpu=False,
        tuned=Tuned.ONE_HOST,
        keeps_order=_of_a_power_of_two,
    ),
    Algorithm("broadcast", "recursive-doubling", broadcast, one_chunk=True, on_gpu=False),
)
