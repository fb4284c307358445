# /// script
# requires-python = ">=3.11"
# dependencies = ["litellm==1.110.2"]
# ///
"""LiteLLM as a library: chat, a stream, completions, and its retries and errors."""

import os

import litellm

url, model = os.environ["BASE_URL"], f"hosted_vllm/{os.environ['MODEL']}"
messages = [{"role": "user", "content": "What is the capital of France?"}]
common = {"model": model, "api_base": f"{url}/v1", "api_key": "unused", "max_tokens": 8}

answer = litellm.completion(messages=messages, **common)
assert answer.choices[0].message.content and answer.usage.completion_tokens == 8
chunks = list(litellm.completion(messages=messages, stream=True, **common))
assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
assert litellm.text_completion(prompt="Once upon a time", **common).choices[0].text
try:
    litellm.completion(messages=messages, **common | {"model": "hosted_vllm/no-such-model"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was served")
print("chat, stream, completions, 404")
