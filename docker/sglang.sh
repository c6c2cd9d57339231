#!/bin/sh
# Starts SGLang with the same variables as the CPU stand-in; arguments are added to SGLang's own.
set -eu
# In a file, because every process of the pod can read arguments.
config="$(mktemp /tmp/engine-XXXXXX.yaml)"
chmod 600 "$config"
{
    [ -z "${ENGINE_API_KEY:-}" ] || echo "api-key: \"$ENGINE_API_KEY\""
    [ -z "${ENGINE_ADMIN_API_KEY:-}" ] || echo "admin-api-key: \"$ENGINE_ADMIN_API_KEY\""
    echo "model-path: \"${ENGINE_MODEL_PATH:?}\""
} >"$config"
unset ENGINE_API_KEY ENGINE_ADMIN_API_KEY
# By default /health samples a token, which fails while a weight update pauses the engine: its pod would be killed.
export SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION="${SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION:-0}"
exec python3 -m sglang.launch_server --config "$config" --host "${ENGINE_HOST:-0.0.0.0}" --port "${ENGINE_PORT:-30000}" \
    --tp-size "${ENGINE_TENSOR_PARALLEL:-1}" --incremental-streaming-output --enable-metrics "$@"
