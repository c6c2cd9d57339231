# Debian's Postgres and Redis in the place of the official images, where no registry is reachable: the same variables,
# ports, data folder, program names and user.
ARG STORES_IMAGE=localhost/leyden-stores:12
FROM ${STORES_IMAGE}
RUN usermod --uid 999 postgres && groupmod --gid 999 postgres \
    && ln -s /usr/bin/redis-server /usr/local/bin/valkey-server
COPY --chmod=0755 postgres.sh /usr/local/bin/docker-entrypoint.sh
USER 999:999
CMD ["docker-entrypoint.sh"]
