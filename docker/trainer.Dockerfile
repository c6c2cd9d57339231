# The trainer: docker build -f docker/trainer.Dockerfile .
# For CPUs: --build-arg VARIANT=cpu --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG VARIANT=cuda
ARG CUDA_IMAGE=docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

# torch's wheels carry the CUDA libraries; the base image carries what the NVIDIA container runtime asks for.
FROM ${CUDA_IMAGE} AS base-cuda
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*

FROM ${PYTHON_IMAGE} AS base-cpu

FROM base-${VARIANT} AS build
ARG TORCH_INDEX_URL
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
WORKDIR /src
RUN python3 -m venv /opt/leyden
ENV PATH=/opt/leyden/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/src/constraints.txt
COPY constraints.txt ./
RUN pip install --quiet ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY pyproject.toml README.md LICENSE ./
RUN mkdir leyden && touch leyden/__init__.py && pip install --quiet ".[trainer]"
COPY leyden leyden
COPY libs libs
COPY services services
COPY examples examples
RUN pip install --quiet --no-deps --force-reinstall . && pip uninstall --quiet --yes pip

FROM base-${VARIANT}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="leyden-trainer" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/leyden /opt/leyden
ENV PATH=/opt/leyden/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 10001:10001
CMD ["python", "-m", "leyden.services.trainer"]
