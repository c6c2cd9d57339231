"""LiteLLM with a response format."""

import sys

import litellm
from pydantic import BaseModel


class Report(BaseModel):
    weather: str
    time: str


messages = [{"role": "user", "content": sys.argv[1]}]
response = litellm.completion(model="openai/gpt-4.1", messages=messages, response_format=Report)
print(Report.model_validate_json(response.choices[0].message.content).model_dump_json())
