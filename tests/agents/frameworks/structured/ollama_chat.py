"""ollama-python's `format` with a schema."""

import sys

from ollama import chat
from pydantic import BaseModel


class Report(BaseModel):
    weather: str
    time: str


messages = [{"role": "user", "content": sys.argv[1]}]
answer = chat(model="qwen3", messages=messages, format=Report.model_json_schema())
print(Report.model_validate_json(answer.message.content).model_dump_json())
