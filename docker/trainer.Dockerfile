# The trainer: docker build -f docker/trainer.Dockerfile .
# For CPUs: --build-arg VARIANT=cpu --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# For weights over the network (docs/gpu.md): --build-arg NCCL=nvidia-nccl-cu13==2.30.7, that of the engine's image.
ARG VARIANT=cuda
ARG CUDA_IMAGE=docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY leyden leyden
COPY libs libs
COPY services services
COPY examples examples
RUN pip wheel --quiet --no-cache-dir --no-deps --wheel-dir /wheel .

# torch's wheels carry the CUDA libraries; the base image carries what the NVIDIA container runtime asks for. Triton
# compiles with gcc and Python's headers: `training.compile`, and `training.attention: flex`. NCCL opens libibverbs and the
# drivers of network cards where there is RDMA, and takes TCP without them.
FROM ${CUDA_IMAGE} AS base-cuda
RUN apt-get update && apt-get install --yes --no-install-recommends gcc ibverbs-providers libc6-dev libibverbs1 \
        python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM ${PYTHON_IMAGE} AS base-cpu

FROM base-${VARIANT}
ARG TORCH_INDEX_URL
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
RUN python3 -m venv /opt/leyden
ENV PATH=/opt/leyden/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/src/constraints.txt
WORKDIR /src
# As in engine.Dockerfile down to the model libraries, so that a builder makes these layers once for both.
COPY constraints.txt ./
RUN pip install --quiet ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY pyproject.toml README.md LICENSE ./
RUN mkdir leyden && touch leyden/__init__.py && pip install --quiet setuptools \
    && pip install --quiet --no-build-isolation ".[service,torch-models]" accelerate
RUN pip install --quiet --no-build-isolation ".[trainer,object-store]"
# In place of the one that torch's wheel asks for.
ARG NCCL
RUN ${NCCL:+pip install --quiet --no-deps "$NCCL"}
COPY --from=wheel /wheel /src/wheel
RUN pip install --quiet --no-deps --force-reinstall wheel/*.whl && pip uninstall --quiet --yes pip
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="leyden-trainer" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor
WORKDIR /tmp
USER 10001:10001
CMD ["python", "-m", "leyden.services.trainer"]
