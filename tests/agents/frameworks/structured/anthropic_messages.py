"""anthropic-python's `parse`."""

import sys

from anthropic import Anthropic
from pydantic import BaseModel


class Report(BaseModel):
    weather: str
    time: str


message = Anthropic().messages.parse(
    model="claude-sonnet-4-5",
    max_tokens=1024,
    messages=[{"role": "user", "content": sys.argv[1]}],
    output_format=Report,
)
print(message.parsed_output.model_dump_json())
