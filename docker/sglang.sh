#!/bin/sh
# Starts SGLang with the same variables as the CPU stand-in; arguments are added to SGLang's own.
set -eu
folder="$(mktemp -d /tmp/engine-XXXXXX)"
# In files, because every process of the pod can read arguments.
{
    [ -z "${ENGINE_API_KEY:-}" ] || echo "api-key: \"$ENGINE_API_KEY\""
    [ -z "${ENGINE_ADMIN_API_KEY:-}" ] || echo "admin-api-key: \"$ENGINE_ADMIN_API_KEY\""
    echo "model-path: \"${ENGINE_MODEL_PATH:?}\""
} >"$folder/config.yaml"
# SGLang prints its arguments with the keys; sed leaves them out of the log.
for key in "${ENGINE_API_KEY:-}" "${ENGINE_ADMIN_API_KEY:-}"; do
    [ -z "$key" ] || printf '%s\n' "$key" | sed 's/[][\\.*^$/]/\\&/g; s/.*/s\/&\/***\/g/' >>"$folder/keys.sed"
done
touch "$folder/keys.sed"
mkfifo "$folder/log"
sed -u -f "$folder/keys.sed" <"$folder/log" &
log=$!
unset ENGINE_API_KEY ENGINE_ADMIN_API_KEY
# By default /health samples a token, which fails while a weight update pauses the engine: its pod would be killed.
export SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION="${SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION:-0}"
server=
interrupted=
trap 'interrupted=yes; [ -z "$server" ] || kill -TERM "$server" 2>/dev/null || true' TERM INT
python3 -m sglang.launch_server --config "$folder/config.yaml" --host "${ENGINE_HOST:-0.0.0.0}" \
    --port "${ENGINE_PORT:-30000}" --tp-size "${ENGINE_TENSOR_PARALLEL:-1}" --incremental-streaming-output \
    --enable-metrics "$@" >"$folder/log" 2>&1 &
server=$!
[ -z "$interrupted" ] || kill -TERM "$server"
# A signal ends the wait with a status of its own, whether the server has ended or not: only the next wait knows.
while :; do
    interrupted=
    wait "$server" && status=0 || status=$?
    [ -n "$interrupted" ] && [ "$status" -gt 128 ] || break
done
wait "$log" || true
exit "$status"
