# The cheapest real agent: one bash without children asks the model once, now and then tells what it did, and prints a
# verdict. Half of the siblings earn 1. OpenTelemetry spans go out with the first sibling of every group.

open_door() { # URL -> descriptor 3
    local address=${1#http://}
    address=${address%%/*}
    exec 3<>"/dev/tcp/${address%:*}/${address#*:}" || exit 1
}

post() { # URL KEY BODY -> the status line in $status
    open_door "$1"
    printf 'POST /%s HTTP/1.1\r\nHost: agent\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s' \
        "${1#http://*/}" "$2" "${#3}" "$3" >&3
    IFS= read -r status <&3
    # The server closes after its answer: everything that was promised before its end has come true by then.
    IFS= read -r -d '' answer <&3
    exec 3>&-
}

post "$OPENAI_BASE_URL/chat/completions" "$OPENAI_API_KEY" \
    '{"model": "any", "max_tokens": 16, "temperature": 1.0, "messages": [{"role": "user", "content": "is it so?"}]}'
[[ $status == *" 200 "* && $answer == *'"finish_reason":"stop"'* ]] || { echo "$status $answer" >&2; exit 1; }

sibling=${LEYDEN_ROLLOUT_ID##*.}
if ((sibling == 0)); then
    printf -v trace '%032x' "$((SRANDOM << 30 | SRANDOM))"
    post "$OTEL_EXPORTER_OTLP_ENDPOINT/v1/traces" "$OPENAI_API_KEY" \
        '{"resourceSpans": [{"scopeSpans": [{"scope": {"name": "scripted"}, "spans": [{"traceId": "'"$trace"'",
        "spanId": "'"${trace:16}"'", "name": "look", "startTimeUnixNano": "1", "endTimeUnixNano": "2",
        "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}},
        {"key": "gen_ai.tool.name", "value": {"stringValue": "look"}}]}]}]}]}'
    [[ $status == *" 200 "* ]] || { echo "$status $answer" >&2; exit 1; }
fi
echo '{"reward": '$((sibling % 2))'}'
