"""Tuning while the program runs: the autotuner's proposals, tried by all ranks between the same two operations.

Rank 0 measures, proposes and keeps the log; what it proposes is passed to the others in an exchange after every sample, so that all
ranks always have the same settings. A sample is some steps of the training, which are told apart by a tensor that comes again; the
score is bytes per second, over the time in which something was in flight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from collectives.autotune import Settings, Space, Tuner
from collectives.batch import Batch
from collectives.config import Config
from collectives.engine import Engine
from collectives.handles import Handle
from collectives.planner import Crossovers, Planner

_SAMPLES_FOR_ALL = 30
"""With fewer samples than this, block sizes and crossovers stay as they are: too many settings for too few samples."""
_SAMPLES_FOR_ALL = 30
"""With fewer samples than this, block sizes and crossovers stay as they are: too many settings for too few samples."""
_BY_HAND = ("fusion_threshold", "segment", "algorithm", "cycle_time")
"""Settings that the environment may have set."""


_MOST_BATCHES_A_STEP = 1000

_log = logging.getLogger("collectives")


class Tuning:
    """Tunes the settings of one world.

    Args:
        engine, planner: of the world.
        config: what is set there by hand is left alone.
        start: what to change to begin with, by name; then nothing counts as set by hand.
    """

    def __init__(self, engine: Engine, planner: Planner, config: Config, start: Mapping[str, Any] | None = None) -> None:
        self._engine = engine
        self._planner = planner
        self._control = engine.context.control
        self._steps = config.autotune_steps
        crossovers, default = planner.crossovers, Config()
        in_force = Settings(
            config.fusion_threshold,
            config.segment,
            crossovers.window,
            crossovers.one_shot_pair if engine.context.size == 2 else crossovers.one_shot,
            config.algorithm,
            config.cycle_time,
        )
        self.settings = replace(in_force, **(start or {}))
        """What is in force."""
        self._tuner: Tuner | None = None
        if engine.context.rank == 0:
            left_alone = {name for name in _BY_HAND if start is None and getattr(config, name) != getattr(default, name)}
            if config.autotune_samples < _SAMPLES_FOR_ALL:
                left_alone |= {"segment", "window", "one_shot"}
            one_host = planner.placement.one_host
            algorithms = ("auto", "ring", "recursive-doubling") if one_host else ("auto", "ring", "direct", "hierarchical")
            algorithms = tuple(dict.fromkeys((*algorithms, self.settings.algorithm)))
            self._tuner = Tuner(
                Space({name: getattr(self.settings, name) for name in left_alone}, algorithms),
                self.settings,
                warmup=config.autotune_warmup,
                samples=config.autotune_samples,
                noise=config.autotune_noise,
                log=_writable(config.autotune_log),
            )
        self.samples = 0
        """Samples taken so far."""
        self._marker: str | None = None
        """The tensor that begins a step."""
        self._batches_since_marker = 0
        self._measures = False
        self._steps_done = -1
        self._bytes = 0
        self._seconds = self._ended = 0.0
        if start:
            self._apply(self.settings)
        engine.on_batch = self._after
        engine.hinder("tuning")

    @property
    def done(self) -> bool:
        """Whether the search is over, and the best settings are in force."""
        return self._engine.on_batch is None

    def _after(self, batch: Batch, handles: Sequence[Handle], submitted: float) -> None:
        """A batch has been carried out; by every rank, whatever its own clock says."""
        now = time.monotonic()
        keys = [handle.key for handle in handles]
        if self._marker in keys or self._marker is None or self._batches_since_marker == _MOST_BATCHES_A_STEP:
            # The first tensor of a step has come again. What changes its name every time makes steps of single batches.
            names = [key for key in keys if type(key) is str]
            self._marker = self._marker if self._marker in keys else names[0] if names else None
            self._batches_since_marker = 0
            if self._measures:
                self._end_step()
            self._measures = True
            if self._engine.on_batch is None:
                return
        self._batches_since_marker += 1
        self._bytes += batch.nbytes
        # Not what it waited for the batches before it.
        self._seconds += now - max(submitted, self._ended)
        self._ended = now

    def _end_step(self) -> None:
        self._steps_done += 1
        if self._steps_done < 0:
            return
        if self._steps_done == 0:
            self._bytes, self._seconds = 0, 0.0  # new settings make new plans, once: that is not what they are judged by
            return
        if self._steps_done < self._steps:
            return
        proposal: tuple[Settings, bool] | None = None
        if self._tuner is not None:
            self._tuner.observe(self._bytes / max(self._seconds, 1e-9))
            proposal = (self._tuner.best if self._tuner.done else self._tuner.propose(), self._tuner.done)
        agreed = self._control.exchange(proposal)[0]
        assert agreed is not None
        settings, done = agreed
        self.samples += 1
        self._steps_done, self._bytes, self._seconds = 0, 0, 0.0
        if self._tuner is not None and not done:
            self._tuner.adopt(settings)
        if settings != self.settings:
            self._apply(settings)
        if done:
            self._engine.on_batch = None
            self._engine.hinder("tuning", False)

    def _apply(self, settings: Settings) -> None:
        self.settings = settings
        self._steps_done = -1
        crossovers = self._planner.crossovers
        pair = self._engine.context.size == 2
        self._planner.change(
            algorithm=settings.algorithm,
            segment=settings.segment,
            crossovers=Crossovers(
                one_shot=crossovers.one_shot if pair else settings.one_shot,
                one_shot_pair=settings.one_shot if pair else crossovers.one_shot_pair,
                window=settings.window,
                window_moves=crossovers.window_moves,
                flat_broadcast=crossovers.flat_broadcast,
                native=crossovers.native,
                doubling=crossovers.doubling,
            ),
        )
        self._engine.change(settings.fusion_threshold, settings.cycle_time)


def _writable(path: str) -> str:
    """The path of the log, or none: that it cannot be written is no reason to stop the ranks."""
    if path:
        try:
            with open(path, "a"):
                return path
        except OSError as error:
            _log.warning("autotune: the log cannot be written: %s", error)
    return ""
