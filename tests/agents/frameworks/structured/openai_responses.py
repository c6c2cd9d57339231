"""openai-python's `parse` over the Responses API."""

import sys

from openai import OpenAI
from pydantic import BaseModel


class Report(BaseModel):
    weather: str
    time: str


response = OpenAI().responses.parse(model="gpt-4.1", input=sys.argv[1], text_format=Report)
print(response.output_parsed.model_dump_json())
