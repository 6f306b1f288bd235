# syntax=docker/dockerfile:1
# From a checkout: docker build -f docker/Dockerfile.numpy -t collectives:numpy .
# EXTRAS: nothing more is needed for NumPy; halves: float16 and bfloat16 at the speed of float32.
FROM python:3.12-slim
ARG EXTRAS=halves
RUN --mount=type=bind,target=/src pip install --no-cache-dir "/src[${EXTRAS}]"
RUN useradd --create-home --uid 1000 --shell /bin/bash trainer
USER trainer
WORKDIR /home/trainer
ENV PYTHONUNBUFFERED=1
