# aider: two questions; the second run reads the chat history of the first.
set -e
aider() {
    command aider --model openai/policy --no-git --yes-always --analytics-disable --no-check-update "$@"
}
aider --message "$1"
aider --restore-chat-history --message "$2"
