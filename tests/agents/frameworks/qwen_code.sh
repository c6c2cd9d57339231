# qwen-code: two questions in one session, with its own tools.
set -e
qwen --auth-type openai --model policy --yolo -p "$1"
qwen --auth-type openai --model policy --yolo --continue -p "$2"
