"""Predict what others have published: ``python -m benchmarks.predictions_published``. Nothing is fitted to it.

NCCL     H100 bus bandwidths at 8 GiB, NCCL 2.24; the NICs of the 32 GPUs are not known, and taken for 400 Gbit/s each
ring     NCCL's ring on 2, 4 and 8 H100, and ASTRA-sim's prediction, as read from the charts of ASTRA-sim's page
         (astra-sim-docs, validation/hardware/gpu-validation-hgx-h100), whose axis is linear: to about 20 us, so that
         sizes below 128 MiB cannot be read
Horovod  efficiencies on 128 hosts of 4 GPUs (arXiv:1802.05799); images per second of one GPU from TensorFlow's
         benchmarks of P100 (tensorflow/docs, r1/guide/performance/benchmarks.md: 64 images a step) and, of ResNet-101,
         from Horovod's docs/benchmarks.rst (1656.82 of 16 GPUs); shapes from keras.applications; fusion 64 MiB and
         cycles of 5 ms, its defaults then; protocol Simple alone, that of NCCL 2.0
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from collectives.simulation import gradients, nccl
from collectives.simulation.prediction import Predictor
from collectives.simulation.steps import Settings, Workload, simulate_step
from collectives.simulation.topology import CLUSTERS, load

BUS_BANDWIDTHS = {8: 479.7, 32: 330.9}
"""GPUs -> GB/s."""
RING = {
    2: {128: (400, 345), 256: (770, 670), 512: (1510, 1350), 1024: (2990, 2710)},
    4: {128: (580, 520), 256: (1100, 1010), 512: (2180, 2020), 1024: (4370, 4060), 2048: (8650, 8040)},
    8: {128: (680, 590), 256: (1290, 1180), 512: (2580, 2390), 1024: (5050, 4700), 2048: (10060, 9350)},
}
"""GPUs -> MiB -> microseconds measured, and predicted by ASTRA-sim."""
EFFICIENCIES = {"InceptionV3": (142.0, 0.90), "ResNet101": (1656.82 / 16, 0.90), "VGG16": (154.0, 0.68)}
"""keras.applications' name -> images per second of one GPU, the published efficiency."""
_BATCH = 64


def main() -> int:
    """Print the three tables; returns the exit status."""
    print("NCCL, all-reduce of 8 GiB: GPUs, GB/s published, predicted, error")
    for gpus, published in BUS_BANDWIDTHS.items():
        predicted = Predictor(load("h100-rails", gpus)).predict("allreduce", 8 << 30)
        busbw = predicted.busbw / 1e9
        print(f"{gpus:4} {published:8.1f} {busbw:8.1f} {busbw / published - 1:+7.1%}  {predicted.algorithm}")
    print("NCCL's ring: GPUs, MiB, us measured, predicted, error, ASTRA-sim's error there")
    for gpus, points in RING.items():
        cluster = replace(CLUSTERS["h100-rails"], ranks=gpus, nvls=False)
        errors = []
        for mib, (measured, astra) in points.items():
            seconds, _ = nccl.time("allreduce", mib << 20, cluster)
            errors.append((1e6 * seconds / measured - 1, astra / measured - 1))
            print(f"{gpus:4} {mib:6} {measured:7} {1e6 * seconds:7.0f} {errors[-1][0]:+7.1%} {errors[-1][1]:+7.1%}")
        ours, others = np.abs(errors).mean(axis=0)
        print(f"{gpus:4} mean error {ours:.1%}, ASTRA-sim's {others:.1%}")
    print("Horovod on 512 GPUs: gradients, MB, ms of a step alone, efficiency published, predicted, error")
    predictor = Predictor(load("p100-25gbit", protocols="Simple"))
    for name, (rate, published) in EFFICIENCIES.items():
        sent = gradients.of_model(f"benchmarks.predictions_published:{name}")
        step = simulate_step(Workload(sent, _BATCH / rate), predictor, Settings(fusion=64 << 20, cycle=5e-3))
        print(
            f"{name:12} {len(sent):4} {sum(sent) / 1e6:6.1f} {1e3 * step.compute:6.0f} {published:6.0%} "
            f"{step.efficiency:7.1%} {step.efficiency / published - 1:+7.1%}"
        )
    return 0


def __getattr__(name: str) -> object:
    """A function that makes one of keras.applications' models, without weights."""
    if name not in EFFICIENCIES:
        raise AttributeError(name)
    import keras

    return lambda: getattr(keras.applications, name)(weights=None)


if __name__ == "__main__":
    sys.exit(main())
