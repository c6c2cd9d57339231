# Debian's Postgres and Redis in the place of the official images, where no registry is reachable: the same variables,
# ports, data folder, program names and user.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}
RUN apt-get update && apt-get install --yes --no-install-recommends postgresql redis-server \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
RUN usermod --uid 999 postgres && groupmod --gid 999 postgres \
    && ln -s /usr/bin/redis-server /usr/local/bin/valkey-server
COPY --chmod=0755 postgres.sh /usr/local/bin/docker-entrypoint.sh
# Postgres' fast shutdown, as in the official image; it stops Redis, too.
STOPSIGNAL SIGINT
USER 999:999
CMD ["docker-entrypoint.sh"]
