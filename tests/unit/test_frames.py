"""Where the threads of a process are, while the garbage that is there may be collected at any time."""

import gc
import os
import subprocess
import sys
import threading

import pytest

from collectives.base.frames import current_frames


class _Garbage:
    """Frees a thread's local data when it is collected."""

    def __init__(self) -> None:
        self.itself = self
        self.local = threading.local()
        self.local.value = 1


def _deep(calls: int, reached: threading.Event, done: threading.Event) -> None:
    if calls:
        _deep(calls - 1, reached, done)
    else:
        reached.set()
        done.wait()


def look_while_garbage_is_collected() -> None:
    """Have the collector run at each of the next objects that are made."""
    usual = gc.get_threshold()
    for objects in range(1, 60):
        reached, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=_deep, args=(10, reached, done))
        thread.start()
        reached.wait()
        gc.disable()
        gc.collect()
        _Garbage()
        gc.set_threshold(objects)
        gc.enable()
        frames = current_frames()
        gc.set_threshold(*usual)
        assert frames.keys() >= {thread.ident, threading.get_ident()}
        assert gc.isenabled()
        done.set()
        thread.join()
        gc.disable()
        current_frames()
        assert not gc.isenabled(), "collected although the program has switched that off"


def look_in_forked_children() -> None:
    """While other threads look: a child has none of them."""

    def look() -> None:
        while True:
            current_frames()

    for _ in range(3):
        threading.Thread(target=look, daemon=True).start()
    for _ in range(100):
        child = os.fork()
        if not child:
            current_frames()
            os._exit(not gc.isenabled())
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("look", ["look_while_garbage_is_collected", "look_in_forked_children"])
def test_looking_at_frames_never_stops_the_process(look: str) -> None:
    program = f"from tests.unit import test_frames; test_frames.{look}()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)  # a process: a hang holds the GIL
