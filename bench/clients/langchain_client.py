# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain-openai==1.8.1"]
# ///
"""LangChain: invoke, stream, batch, tools, and embeddings of texts (it sends them as token ids)."""

import os

from langchain_openai import ChatOpenAI, OpenAIEmbeddings

url, model = os.environ["BASE_URL"], os.environ["MODEL"]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, max_tokens=8)

answer = chat.invoke("What is the capital of France?")
assert answer.content and answer.usage_metadata and answer.usage_metadata["output_tokens"] == 8
assert "".join(str(chunk.content) for chunk in chat.stream("Count to ten."))
assert len(chat.batch([f"What is {number} squared?" for number in range(16)])) == 16
weather = {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}
assert chat.bind_tools([weather]).invoke("How is the weather?")
embeddings = OpenAIEmbeddings(
    base_url=f"{url}/v1", api_key="unused", model=model, check_embedding_ctx_length=False
)
assert len(embeddings.embed_documents(["one", "two"])) == 2
print("invoke, stream, batch of 16, tools, embeddings")
