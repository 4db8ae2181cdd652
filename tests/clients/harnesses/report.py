"""What each program prints: a line for each loop, with the calls that were made in it and the model's last answer."""

import json

calls: list[str] = []


def weather(city: str) -> str:
    """Look up the weather in a city."""
    calls.append(city)
    return f"The sun shines in {city}."


def report(answer: str) -> None:
    print(json.dumps({"calls": [*calls], "answer": answer}))
    calls.clear()
