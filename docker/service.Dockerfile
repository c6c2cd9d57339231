# One service that needs no torch: docker build -f docker/service.Dockerfile --build-arg SERVICE=gateway .
# SERVICE is api, controller, runner, gateway, collector, credit or grader. Any of them migrates the database.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
# For a mirror, or a folder of wheels that the builder mounts; unset, pip asks PyPI.
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

FROM ${PYTHON_IMAGE}
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
RUN python -m venv /opt/leyden
ENV PATH=/opt/leyden/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/src/constraints.txt
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
# Without the code: this layer and the next change with the dependencies alone. All services share this one.
RUN mkdir leyden && touch leyden/__init__.py && pip install --quiet setuptools \
    && pip install --quiet --no-build-isolation ".[service,store]"
ARG SERVICE
# The API and the controller, whose image the engines' sidecar has, too, read the object store of versions.
RUN case "${SERVICE:?name a service by --build-arg SERVICE=gateway}" in *api*|*controller*) extras="$SERVICE,object-store" ;; \
    *) extras="$SERVICE" ;; esac && pip install --quiet --no-build-isolation ".[$extras]"
COPY --from=wheel /wheel /src/wheel
RUN pip install --quiet --no-deps --force-reinstall wheel/*.whl && pip uninstall --quiet --yes pip setuptools
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="leyden-${SERVICE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV LEYDEN_SERVICE=${SERVICE}
WORKDIR /tmp
USER 10001:10001
CMD ["sh", "-c", "exec python -m leyden.services.$LEYDEN_SERVICE"]
