"""instructor: an answer as an object, by a forced call and by a schema, and a tool loop by a union of two objects."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel
from report import report, weather

url, name = sys.argv[1:]


class Weather(BaseModel):
    """Ask for the weather in a city."""

    city: str


class Answer(BaseModel):
    """Answer the question."""

    text: str


def ask(mode: instructor.Mode, wanted: type, messages: list) -> BaseModel:
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=name, messages=messages, response_model=wanted, max_tokens=64, temperature=0, max_retries=0
    )


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    found = weather(ask(mode, Weather, messages).city)
    messages += [{"role": "assistant", "content": "I looked it up."}, {"role": "user", "content": found}]
    report(ask(mode, Answer, messages).text)
