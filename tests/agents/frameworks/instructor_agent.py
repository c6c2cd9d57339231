"""instructor: each answer is an object, which the model is made to give by a call; the second one is streamed."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer to the question."""

    text: str


client = instructor.from_openai(OpenAI())
messages = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": sys.argv[1]},
]
first = client.create(model="gpt-4.1", messages=messages, response_model=Answer)
print(first.text)
messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": sys.argv[2]}]
for partial in client.create_partial(model="gpt-4.1", messages=messages, response_model=Answer):
    second = partial
print(second.text)
