"""Online tuning: all ranks adopt the tuner's proposals between the same two operations.

Rank 0 measures, proposes and writes the log; an exchange after every sample passes its proposal to the others, so that
all ranks always have the same settings. A sample is some steps of the training, which are found by the operations that
recur (`collectives.tuning.steps`); the score is bytes per second over the time in which operations were in flight.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from collectives.base.config import Config
from collectives.base.logging import logger
from collectives.engine.batches import Batch
from collectives.engine.engine import Engine
from collectives.engine.handles import Handle
from collectives.plan.planner import Planner
from collectives.schedules import registry
from collectives.tuning.search import SearchSpace, TunedSettings, Tuner
from collectives.tuning.steps import Steps

_SAMPLES_FOR_ALL = 30
"""Samples from which block sizes and crossovers are tuned too; fewer do not suffice for so many settings."""
_BY_HAND = ("fusion_threshold", "segment", "algorithm", "cycle_time")
"""TunedSettings that the environment may have set."""


class Tuning:
    """Tunes the settings of one world.

    Args:
        config: settings that differ from the defaults there are not tuned.
        start: changes to begin with, by name; then all settings are tuned.
    """

    def __init__(
        self, engine: Engine, planner: Planner, config: Config, start: Mapping[str, Any] | None = None
    ) -> None:
        self._engine = engine
        self._planner = planner
        self._control = engine.context.control
        self._steps, self._warmup = config.autotune_steps, config.autotune_warmup
        crossovers, default = planner.crossovers, Config()
        in_force = TunedSettings(
            config.fusion_threshold,
            config.segment,
            crossovers.window,
            crossovers.one_shot,
            config.algorithm,
            config.cycle_time,
        )
        self.settings = replace(in_force, **(start or {}))
        """The settings in force."""
        self._tuner: Tuner | None = None
        if engine.context.rank == 0:
            left_alone = {
                name for name in _BY_HAND if start is None and getattr(config, name) != getattr(default, name)
            }
            if config.autotune_samples < _SAMPLES_FOR_ALL:
                left_alone |= {"segment", "window", "one_shot"}
            tried = ("auto", *registry.tuned(planner.placement.one_host), self.settings.algorithm)
            algorithms = tuple(dict.fromkeys(tried))
            self._tuner = Tuner(
                SearchSpace({name: getattr(self.settings, name) for name in left_alone}, algorithms),
                self.settings,
                warmup=config.autotune_warmup,
                samples=config.autotune_samples,
                noise=config.autotune_noise,
                log=_writable(config.autotune_log),
            )
        self.samples = 0
        """Samples taken so far."""
        self._training = Steps()
        self._steps_seen = 0
        self._steps_done = -1
        self._bytes = 0
        self._seconds = self._ended = 0.0
        if start:
            self._apply(self.settings)
        self.done = False
        """Whether the search has ended and the best settings are in force."""
        engine.on_batch(self._after)
        engine.set_obstacle("tuning")

    def _after(self, batch: Batch, handles: Sequence[Handle], submitted: float) -> None:
        """Score a batch that every rank has carried out; where steps begin does not depend on a clock."""
        now = time.monotonic()
        if self._training.begins([_known(handle) for handle in handles]):
            self._end_step()
            if self.done:
                return
        self._bytes += batch.nbytes
        # Without the time that it waited for the batches before it.
        self._seconds += now - max(submitted, self._ended)
        self._ended = now

    def _end_step(self) -> None:
        self._steps_seen += 1
        self._steps_done += 1
        if self._steps_done == 0:
            self._bytes, self._seconds = 0, 0.0  # the first step makes new plans, which must not count
            return
        if self._steps_done < self._steps:
            return
        proposal: tuple[TunedSettings, bool] | None = None
        if self._tuner is not None:
            score, phase = self._bytes / max(self._seconds, 1e-9), self._tuner.phase
            self._tuner.observe(score)
            logger.info("autotune: %s: %.4g GB/s over %d steps with %s", phase, score / 1e9, self._steps, self.settings)
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
            self.done = True
            self._engine.on_batch(None)
            self._engine.set_obstacle("tuning", False)
            if self._tuner is not None:
                logger.info(
                    "autotune: chosen after %d samples, at %.4g GB/s: %s",
                    self._tuner.taken,
                    self._tuner.best_score / 1e9,
                    settings,
                )

    def close(self) -> None:
        """Log on rank 0, once, how far the search came by the end of the world, and why if nothing was sampled."""
        tuner, self._tuner = self._tuner, None
        if tuner is None or self.done:
            return
        tuner.end(self.settings)
        if tuner.taken:
            logger.info(
                "autotune: ended after %d of %d samples; the best so far: %s", tuner.taken, tuner.samples, tuner.best
            )
            return
        if not self._training.repeats:
            why = "no operation was called twice, so that no training step could be recognised"
        elif self._steps_seen < (needed := 1 + self._steps * (self._warmup + 1)):
            why = (
                f"it saw {self._steps_seen} steps, but the first sample ends after {needed} "
                f"(COLLECTIVES_AUTOTUNE_STEPS={self._steps} for each sample, "
                f"COLLECTIVES_AUTOTUNE_WARMUP={self._warmup} samples discarded)"
            )
        else:
            why = "the steps moved no bytes"
        logger.warning(
            "autotune: sampled nothing, because %s; settings stay as they were: %s [U18]", why, self.settings
        )

    def _apply(self, settings: TunedSettings) -> None:
        self.settings = settings
        self._steps_done = -1
        self._planner.change(
            algorithm=settings.algorithm,
            segment=settings.segment,
            crossovers=replace(self._planner.crossovers, one_shot=settings.one_shot, window=settings.window),
        )
        self._engine.change(settings.fusion_threshold, settings.cycle_time)


def _known(handle: Handle) -> tuple[str | int, int]:
    """What identifies an operation, and its bytes; both are equal on all ranks, so the rows of gathers do not count."""
    parts = handle.members or (handle,)
    nbytes = sum(part.entry.nbytes for part in parts if part.entry.request.collective not in ("allgather", "alltoall"))
    return handle.entry.name or handle.entry.signature, nbytes


def _writable(path: str) -> str:
    """The path of the log, or "" with a warning if it cannot be written, which must not stop the ranks."""
    if path:
        try:
            with open(path, "a"):
                return path
        except OSError as error:
            logger.warning("autotune: the log cannot be written: %s [U19]", error)
    return ""
