# A server of S3 that keeps objects in its pod, in the place of an operator's store: docker build -f … .
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /opt/s3 \
    && /opt/s3/bin/pip install --quiet --no-cache-dir --constraint constraints.txt moto flask flask-cors
WORKDIR /tmp
USER 10001:10001
CMD ["/opt/s3/bin/moto_server", "-H", "0.0.0.0", "-p", "5000"]
