"""The process between ``mpirun`` or ``agent.py`` and one rank: forwards the rank's output in frames, and reports how it
ends.

``collectivesrun`` starts it once per rank as a plain script without site-packages. It imports only what it needs of the
standard library, and nothing of collectives, so that it takes about ten milliseconds and little memory.

    mpirun or agent.py -> rank.py -> python train.py

Its arguments are encoded (``pack``), so that no launcher in between interprets one of them. All output of the rank is
sent as frames, each a line on stderr: launchers forward whole lines from every host, and never mix two. A frame is DLE,
the rank, one letter, the bytes with DLE and line feed escaped, and a line feed:

    o, e    the rank's stdout and stderr
    r       what ``collectives.worlds.exit_hooks`` writes: a line of JSON when the rank fails, and an empty line when it
            has joined others
    x       how the rank has ended, seen from outside (an exception before ``init()``, ``kill -9``), a line of JSON
    s       what ``collectives.worlds.status`` says twice a second of what the rank does, lines of JSON

The rank's stdout and stderr are pseudo-terminals if the launcher's own are terminals, for progress bars and colours.
Signals are forwarded, and the rank is killed if the launcher dies, or on SIGQUIT, with the processes that it has
started; a member of an elastic job leaves none of them behind in any case. With ``--output-filename DIR`` the output is
also written to ``DIR/rank.N``. The exit code is the rank's, 128 + N for signal N.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import stat
import sys
import termios
import time
from collections.abc import Mapping

_LAUNCHERS_VARIABLES = {
    "RANK": ("COLLECTIVES_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"),
    "SIZE": ("COLLECTIVES_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("COLLECTIVES_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_SIZE": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""Variables of ``agents.py``, Open MPI and MPICH that say a rank's place."""
_TORCHS_VARIABLES = {
    "RANK": "RANK",
    "WORLD_SIZE": "SIZE",
    "LOCAL_RANK": "LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
}
"""Variables that torchrun sets and programs read, with those of `_LAUNCHERS_VARIABLES`."""
_TORCHS_PLACE = "COLLECTIVES_TORCHS_PLACE"
"""The variable that says that torch's are set by this program; see ``collectives.base.launchers``."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
RECORDS = "COLLECTIVES_RECORDS"
"""The variable with the path to which the rank writes its record, as in ``collectives.worlds.exit_hooks``."""
STATUS = "COLLECTIVES_STATUS"
"""The variable with the path of the pipe for what the rank does; 0: it is not to say it."""
INPUT = "COLLECTIVES_INPUT"
"""The variable by which MPI's rank 0 finds the launcher's standard input, if it is on its host; see `input_of_here`."""
MARK = b"\x10"
_FRAME = 4096
"""Maximum bytes of a frame: writes to a pipe are atomic up to PIPE_BUF, so a launcher never reads half a frame."""
_READ = 64 << 10
_MOST_DRAINED = 1 << 20
"""Maximum bytes drained from an output, to which a process may write without end; a pipe holds no more."""
_LOOK = 1.0
"""Seconds between checks that the launcher is alive."""
_UNTIL_READ = 0.5
_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789./_-=,+")


def pack(words: list[str]) -> list[str]:
    """Encode words so that they pass through any launcher: percent-encoded ASCII, none empty, none like an option."""
    return [
        "=" + "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in os.fsencode(word)) for word in words
    ]


def unpack(words: list[str]) -> list[str]:
    """Decode the words of ``pack``."""
    decoded = []
    for word in words:
        first, *rest = word[1:].split("%")
        decoded.append(
            os.fsdecode(first.encode() + b"".join(bytes.fromhex(part[:2]) + part[2:].encode() for part in rest))
        )
    return decoded


def frames(rank: str, kind: bytes, data: bytes) -> list[bytes]:
    """Return the frames that carry data."""
    head = MARK + rank.encode() + kind
    room = _FRAME - len(head) - 1
    made = []
    while data:
        piece = data[:room]
        while len(escaped := piece.replace(MARK, MARK + b"p").replace(b"\n", MARK + b"n")) > room:
            piece = piece[: len(piece) * room // len(escaped)]
        made.append(head + escaped + b"\n")
        data = data[len(piece) :]
    return made


def input_of_here() -> str:
    """Return where another process of this host can open this one's standard input: its path, device and number; empty
    if it cannot."""
    status = os.fstat(0)
    if sys.platform != "linux" or stat.S_ISSOCK(status.st_mode):
        return ""
    return f"/proc/{os.getpid()}/fd/0 {status.st_dev} {status.st_ino}"


def _open_input(place: str) -> None:
    """Read the launcher's standard input itself, by what `input_of_here` says of it."""
    path, device, number = place.split()
    try:
        source = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)  # of a FIFO, it would wait for a writer
        status = os.fstat(source)
        if (str(status.st_dev), str(status.st_ino)) == (device, number):
            if stat.S_ISREG(status.st_mode):  # from where the launcher's own has come to
                with open(path.replace("/fd/", "/fdinfo/")) as about:
                    os.lseek(source, int(about.readline().split()[1]), os.SEEK_SET)
            os.set_blocking(source, True)
            os.dup2(source, 0)
        os.close(source)
    except OSError:
        return  # another host's


def main(output: str, width: int, placement: str, terminal: str, command: list[str]) -> int:
    """Run the command as this rank and return its exit code.

    Args:
        output: folder to which the output is also written; empty: none.
        width: digits of a rank in the names there.
        placement: the expected number of ranks on each host, ``"2,2"``, to set Horovod's variables; empty: do not.
        terminal: ``"LINES COLUMNS 1 2"``: the size of the launcher's terminal, and which of its streams are on it;
            empty: none.
    """
    launcher = os.getppid()
    place = _place()
    rank = place.get("RANK", "0")
    if (launchers_input := os.environ.pop(INPUT, "")) and rank == "0":
        _open_input(launchers_input)
    if placement:
        os.environ.update(_in_horovods_words(place, [int(number) for number in placement.split(",")]))
    os.environ.update(_in_torchs_words(place, os.environ))
    folder = os.path.join(output, f"rank.{rank.zfill(width)}")
    copies = {b"o": _Copy(rank, folder, "stdout"), b"e": _Copy(rank, folder, "stderr")} if output else {}
    records = _Records(rank)
    os.environ[RECORDS] = records.path
    statuses = -1
    if sys.platform == "linux" and os.environ.get(STATUS) != "0":
        statuses, sink = os.pipe()
        os.set_blocking(statuses, False)
        os.environ[STATUS] = f"/proc/{os.getpid()}/fd/{sink}"
    child, sources = _start(command, terminal.split())
    if statuses >= 0:
        sources[statuses] = b"s"
    if records.source >= 0:
        sources[records.source] = b"r"
    ended: dict[str, float] = {}

    def pass_on(number: int, frame: object) -> None:
        if number in _ENDING:
            ended.setdefault("ended", time.time())
        _send_signal(child, number)

    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.signal(signal.SIGQUIT, lambda number, frame: _kill_group(child))
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)

    status: int | None = None
    while status is None:
        ready, _, _ = select.select([*sources, wake], [], [], _LOOK)
        if wake in ready:
            os.read(wake, 4096)
        if records.source in ready:
            # The rank waits until its record is read; its earlier output precedes the record.
            _drain(rank, {source: kind for source, kind in sources.items() if source != records.source}, copies)
            _wait_until_read()
        for source in [source for source in sources if source in ready]:
            if _pass_on(rank, source, sources[source], copies) is None:
                del sources[source]
        pid, exit_status = os.waitpid(child, os.WNOHANG)
        if pid:
            status = exit_status
        if os.getppid() != launcher:
            _kill_group(child)
            if not pid:
                _send_signal(child, signal.SIGKILL)
    # The rank's last output is in the pipe, which a process that it left behind may hold open: do not wait for its end.
    _drain(rank, sources, copies)
    if "COLLECTIVES_MEMBER" in os.environ:
        _kill_group(child)  # the job goes on, and needs what they hold
    code = os.waitstatus_to_exitcode(status)
    code = 128 - code if code < 0 else code
    _write(rank, b"r", records.left())
    entry = {"rank": int(rank), "code": code, "text": "", "time": time.time(), "host": os.uname().nodename, **ended}
    _write(rank, b"x", json.dumps(entry).encode() + b"\n")
    _wait_until_read()
    return code


def _place() -> dict[str, str]:
    """Return this rank's place, as far as its launcher tells it: RANK, SIZE, LOCAL_RANK, LOCAL_SIZE."""
    place = {
        word: next((os.environ[name] for name in names if name in os.environ), "")
        for word, names in _LAUNCHERS_VARIABLES.items()
    }
    return {word: text for word, text in place.items() if text}


def _in_horovods_words(place: dict[str, str], placement: list[int]) -> dict[str, str]:
    """Return Horovod's variables for this rank's place.

    The cross rank and size follow from the requested placement, if the rank is where that has it.
    """
    place = dict(place)
    if "RANK" in place and "LOCAL_RANK" in place:
        place["HOSTNAME"] = os.uname().nodename
        rank, local_rank = int(place["RANK"]), int(place["LOCAL_RANK"])
        first = 0
        for host, number in enumerate(placement):
            if rank < first + number:
                local_size = place.get("LOCAL_SIZE", str(number))
                if local_rank == rank - first and local_size == str(number):
                    peers = [other for other, ranks in enumerate(placement) if ranks > local_rank]
                    cross = {"CROSS_RANK": str(peers.index(host)), "CROSS_SIZE": str(len(peers))}
                    place |= {"LOCAL_SIZE": local_size, **cross}
                break
            first += number
    return {f"HOROVOD_{word}": text for word, text in place.items()}


def _in_torchs_words(place: dict[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables that the environment lacks, where the launcher has said where torch's ranks meet."""
    if place.get("SIZE", "1") == "1" or "MASTER_PORT" not in environment:
        return {}
    told = {name: place[word] for name, word in _TORCHS_VARIABLES.items() if word in place}
    told[_TORCHS_PLACE] = f"{place['RANK']} {place['SIZE']} {environment['MASTER_PORT']}"
    return {name: text for name, text in told.items() if name == _TORCHS_PLACE or name not in environment}


class _Records:
    """The destination of the rank's record: a pipe, which descendants open by its path (Linux), else a file."""

    def __init__(self, rank: str) -> None:
        self.source = -1
        self.path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"collectives-{os.getpid()}-{rank}")
        if sys.platform == "linux":
            self.source, self._sink = os.pipe()
            os.set_blocking(self.source, False)
            self.path = f"/proc/{os.getpid()}/fd/{self._sink}"

    def left(self) -> bytes:
        """Read and remove the file."""
        if self.source >= 0 or not os.path.exists(self.path):
            return b""
        with open(self.path, "rb") as file:
            data = file.read()
        os.unlink(self.path)
        return data


def _start(command: list[str], terminal: list[str]) -> tuple[int, dict[int, bytes]]:
    """Start the rank in a process group of its own; return its pid, and the kind of output by file descriptor."""
    pairs = {target: _terminal(terminal) if str(target) in terminal[2:] else os.pipe() for target in (1, 2)}
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            for target, (_, rank_end) in pairs.items():
                os.dup2(rank_end, target)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)  # Python ignores them, and the program would inherit that
            _die_with(parent)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"collectivesrun: cannot run {command[0]!r}: {error.strerror} [L60]\n".encode())
        os._exit(127)
    for source, rank_end in pairs.values():
        os.close(rank_end)
        os.set_blocking(source, False)
    return child, {pairs[1][0]: b"o", pairs[2][0]: b"e"}


def _terminal(size: list[str]) -> tuple[int, int]:
    """Open a pseudo-terminal without output processing; returns the end to read from and the rank's end."""
    launcher_end, rank_end = os.openpty()
    settings = termios.tcgetattr(rank_end)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(rank_end, termios.TCSANOW, settings)
    sides = b"".join(int(side).to_bytes(2, sys.byteorder) for side in size[:2])
    fcntl.ioctl(rank_end, termios.TIOCSWINSZ, sides + bytes(4))
    return launcher_end, rank_end


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies, even by kill -9 (Linux)."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


class _Copy:
    """A copy of one of the rank's outputs in a file; given up if the file cannot be written."""

    def __init__(self, rank: str, folder: str, name: str) -> None:
        path = os.path.join(folder, name)
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            self._file = -1
            _write(rank, b"e", f"collectivesrun: cannot write {path!r}: {error.strerror} [L61]\n".encode())

    def add(self, data: bytes) -> None:
        try:
            while data and self._file >= 0:
                data = data[os.write(self._file, data) :]
        except OSError:
            os.close(self._file)
            self._file = -1


def _pass_on(rank: str, source: int, kind: bytes, copies: dict[bytes, _Copy]) -> int | None:
    """Forward available output; return the number of bytes, or None at the end of the output."""
    try:
        data = os.read(source, _READ)
    except BlockingIOError:
        return 0
    except OSError:
        return None  # a terminal whose other end is closed
    if kind in copies:
        copies[kind].add(data)
    _write(rank, kind, data)
    return len(data) or None


def _drain(rank: str, sources: dict[int, bytes], copies: dict[bytes, _Copy]) -> None:
    """Forward the output that is available from all sources."""
    for source, kind in sources.items():
        left = _MOST_DRAINED
        while (
            left > 0
            and select.select([source], [], [], 0)[0]
            and (count := _pass_on(rank, source, kind, copies)) is not None
        ):
            left -= count


def _write(rank: str, kind: bytes, data: bytes) -> None:
    for frame in frames(rank, kind, data):
        while frame:
            try:
                frame = frame[os.write(2, frame) :]
            except BlockingIOError:
                select.select([], [2], [], _LOOK)
            except OSError:
                return  # the reader is gone, which must not affect the rank


def _wait_until_read() -> None:
    """Wait a bounded time until the launcher has read all output: MPICH's drops unread output after a failure."""
    end = time.monotonic() + _UNTIL_READ
    try:
        while any(fcntl.ioctl(2, termios.FIONREAD, bytes(4))) and time.monotonic() < end:
            time.sleep(0.002)  # a pipe does not notify its writer of reads
    except OSError:
        return


def _kill_group(child: int) -> None:
    """Kill the processes of the rank's group, which its descendants belong to, unless they have left it."""
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _send_signal(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    _output, _width, _placement, _size, *_command = unpack(sys.argv[1:])
    sys.exit(main(_output, int(_width), _placement, _size, _command))
