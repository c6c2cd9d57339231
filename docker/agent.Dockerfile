# A base for agents: Python, a numeric user, a folder to work in, and nothing of the platform.
# An agent's own Dockerfile begins with it and adds packages and code, as examples/flight_agent/Dockerfile does.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="leyden-agent" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /agent
USER 10001:10001
