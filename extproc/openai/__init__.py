"""OpenAI requests and errors: reading a body, cutting members out of its bytes, answering a refusal."""
