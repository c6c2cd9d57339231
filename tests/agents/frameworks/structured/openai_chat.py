"""openai-python's `parse` over chat completions."""

import sys

from openai import OpenAI
from pydantic import BaseModel


class Report(BaseModel):
    weather: str
    time: str


completion = OpenAI().chat.completions.parse(
    model="gpt-4.1", messages=[{"role": "user", "content": sys.argv[1]}], response_format=Report
)
print(completion.choices[0].message.parsed.model_dump_json())
