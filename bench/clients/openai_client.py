# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.60.0"]
# ///
"""The official client: chat, a stream with its usage, completions, embeddings, models, an error."""

import os

from openai import NotFoundError, OpenAI

url, model = os.environ["BASE_URL"], os.environ["MODEL"]
client = OpenAI(base_url=f"{url}/v1", api_key="unused")
messages = [{"role": "user", "content": "What is the capital of France?"}]

answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
assert answer.choices[0].message.content and answer.usage and answer.usage.completion_tokens == 8

chunks = list(
    client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
)
assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 8

raw = client.completions.with_raw_response.create(model=model, prompt="Once upon a time", max_tokens=4)
assert raw.parse().choices[0].text and raw.headers["x-inferact-node"]
assert len(client.embeddings.create(model=model, input=["one", "two"]).data) == 2
assert model in {entry.id for entry in client.models.list()}
hinted = client.chat.completions.create(
    model=model, messages=messages, max_tokens=1, extra_body={"x-inferact": {"priority": 9}}
)
assert hinted.choices
try:
    client.chat.completions.create(model="no-such-model", messages=messages)
except NotFoundError as error:
    assert error.code == "model_not_found"
else:
    raise AssertionError("an unknown model was served")
print("chat, stream with usage, completions, embeddings, models, hints, 404")
