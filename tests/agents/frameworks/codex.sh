# Codex CLI: two questions in one session, with its own tools.
set -e
set -- "$1" "$2" \
    -c model_provider=leyden -m policy -c model_providers.leyden.name=leyden -c model_providers.leyden.wire_api=responses \
    -c model_providers.leyden.env_key=OPENAI_API_KEY -c "model_providers.leyden.base_url='$OPENAI_BASE_URL'" \
    --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox
first=$1 second=$2
shift 2
codex exec "$@" "$first"
codex exec resume --last "$@" "$second"
