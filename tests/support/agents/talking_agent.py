"""Agent of the tests: asks what the arguments say, with the openai client, and prints its answer.

usage: talking_agent.py MODE...

See the functions for the modes, which run one after the other. The question is read from example.json.
"""

import asyncio
import base64
import json
import os
import sys
import time
from pathlib import Path

import httpx
import openai

EXAMPLE = json.loads(Path("example.json").read_text())
client = openai.OpenAI(timeout=60, max_retries=0)


def say(messages: list[dict], **more: object) -> str:
    return client.chat.completions.create(model="gpt-4o", messages=messages, **more).choices[0].message.content or ""


def user(text: str, *paths: str) -> dict:
    files = [base64.b64encode(Path(path).read_bytes()).decode() for path in paths]
    images = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}} for file in files]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def linear() -> None:
    """Two turns; the answer is the last response."""
    messages = [user(EXAMPLE["question"], *EXAMPLE["images"])]
    messages += [assistant(say(messages, temperature=0.2, max_tokens=4)), user("Are you sure?")]
    print(say(messages))


def branches() -> None:
    """A second answer to the first question, and a conversation that forgets everything."""
    first = [user(EXAMPLE["question"], *EXAMPLE["images"])]
    reply = say(first)
    say([*first, assistant(reply), user("Continue.")])
    say([*first, assistant(reply), user("Try something else.")])
    say([{"role": "system", "content": "Be short."}, user("Summarize."), assistant("Of what?"), user("Of this.")])
    say([*first, assistant(reply.upper() + "!"), user("Edited.")])
    print("done")


def streamed() -> None:
    """A streamed response with token counts."""
    chunks = list(client.chat.completions.create(
        model="policy", messages=[user(EXAMPLE["question"])], stream=True, stream_options={"include_usage": True},
    ))  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    print(json.dumps([text, chunks[-1].usage.completion_tokens, chunks[-2].choices[0].finish_reason]))


def parallel() -> None:
    """Three sub-agents at the same time, and the same request twice at the same time."""
    waiting = openai.AsyncOpenAI(timeout=60, max_retries=0)

    async def one(text: str) -> str:
        return (await waiting.chat.completions.create(model="policy", messages=[user(text)])).choices[0].message.content or ""

    async def run() -> list[str]:
        return list(await asyncio.gather(one("A"), one("B"), one("C"), one("A")))

    found = asyncio.run(run())
    print(json.dumps(found))


def retried() -> None:
    """A request that is repeated with its idempotency key after the response."""
    headers = {"Idempotency-Key": "one"}
    print(json.dumps([say([user("Hello.")], extra_headers=headers), say([user("Hello.")], extra_headers=headers)]))


def refused() -> None:
    """Requests that are rejected, each with its error."""
    asks = [
        {"n": 100},
        {"stop": ["x", ""]},
        {"logit_bias": {"5": 1}},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"magic": 1}},
    ]
    errors = []
    for more in asks:
        try:
            say([user("Hello.")], **more)
        except openai.BadRequestError as error:
            errors.append(error.body["param"])
    try:
        openai.OpenAI(api_key="sk-wrong", max_retries=0).models.list()
    except openai.AuthenticationError as error:
        errors.append(error.body["code"])
    say([user("Hello.")])
    print(json.dumps(errors))


ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds <|im_end|> numbers.", "parameters": {"type": "object", "properties": {"x": {}}}},
}


def tools() -> None:
    """Two turns with tools: the agent returns the message of the client as it is, and the results
    of two calls, one of them with an image. Then it forgets the question, and changes a call.
    """
    messages = [user(EXAMPLE["question"], *EXAMPLE["images"])]
    asked = client.chat.completions.create(model="policy", messages=messages, tools=[ADD], tool_choice="auto")
    message = asked.choices[0].message
    found = [asked.choices[0].finish_reason, message.content, *(json.loads(call.function.arguments) for call in message.tool_calls)]
    results = [{"role": "tool", "tool_call_id": call.id, "content": f"= {number}"} for number, call in enumerate(message.tool_calls)]
    results[1]["content"] = user("= 1", *EXAMPLE["images"])["content"]
    messages += [message, *results]
    answer = client.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices[0].message
    client.chat.completions.create(model="policy", messages=[user("Again."), message, *results], tools=[ADD])
    changed = message.model_dump(exclude_none=True)
    changed["tool_calls"][0]["function"]["arguments"] = '{"x": 7}'
    client.chat.completions.create(model="policy", messages=[messages[0], changed, *results], tools=[ADD])
    client.chat.completions.create(model="policy", messages=[user("No tools.")])
    print(json.dumps([*found, answer.content]))


def streamed_calls() -> None:
    """Two tool calls in a streamed response."""
    text, calls, reason = "", {}, None
    for chunk in client.chat.completions.create(model="policy", messages=[user("Hello.")], tools=[ADD], stream=True):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        text += delta.content or ""
        for call in delta.tool_calls or []:
            calls[call.index] = [call.function.name, call.function.arguments]
    print(json.dumps([text, [calls[index] for index in sorted(calls)], reason]))


def choices() -> None:
    """Three choices, of which the second is continued."""
    first = [user("Hello.")]
    found = client.chat.completions.create(model="policy", messages=first, n=3)
    texts = [choice.message.content for choice in found.choices]
    say([*first, assistant(texts[1]), user("More.")])
    print(json.dumps([*texts, found.usage.completion_tokens]))


def stops() -> None:
    """A response that ends before a stop string, which the agent adds again."""
    first = [user("Hello.")]
    text = say(first, stop=["</code>", "!"])
    say([*first, assistant(text + "</code>"), user("More.")])
    say([*first, assistant(text), user("More!")])
    print(text)


def posts() -> None:
    """Posts two rewards, after trying to do so with the key that samples."""
    say([user("Hello.")])
    address = os.environ["OPENAI_BASE_URL"] + "/rewards"
    codes = []
    for key, body in (
        (client.api_key, {"reward": 9}), (os.environ["MEGATRON_RL_REWARD_KEY"], {"reward": "9"}),
        (os.environ["MEGATRON_RL_REWARD_KEY"], {"reward": 0.25}), (os.environ["MEGATRON_RL_REWARD_KEY"], {"reward": 0.75}),
    ):  # fmt: skip
        codes.append(httpx.post(address, json=body, headers={"Authorization": f"Bearer {key}"}).status_code)
    try:
        openai.OpenAI(api_key=os.environ["MEGATRON_RL_REWARD_KEY"], max_retries=0).models.list()
    except openai.AuthenticationError as error:
        codes.append(error.status_code)
    assert codes == [401, 400, 200, 200, 401], codes


def forgets() -> None:
    """An agent that should post a reward and does not."""
    say([user("Hello.")])


def endless() -> None:
    """An agent that never stops."""
    messages = [user("Hello.")]
    while True:
        messages += [assistant(say(messages)), user("More.")]


def silent() -> None:
    """An agent that never asks."""
    print("nothing to say", file=sys.stderr)


def crash() -> None:
    """An agent that fails after a response."""
    raise SystemExit(f"cannot parse {say([user('Hello.')])!r}")


def hang() -> None:
    """An agent that asks once and then waits, with a child process."""
    say([user("Hello.")])
    child = os.fork()
    Path(EXAMPLE["system"]).write_text(f"{os.getpid()} {child or os.getpid()}")
    time.sleep(600)


if __name__ == "__main__":
    for mode in sys.argv[1:]:
        globals()[mode]()
