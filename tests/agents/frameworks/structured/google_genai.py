"""google-genai's `response_schema`, with the class of the object."""

import sys

from google import genai
from pydantic import BaseModel


class Report(BaseModel):
    weather: str
    time: str


client = genai.Client()
answer = client.models.generate_content(
    model="gemini-2.5-flash",
    contents=sys.argv[1],
    config={"response_mime_type": "application/json", "response_schema": Report},
)
print(answer.parsed.model_dump_json())
