"""A simulated inference engine, like vLLM in its times, KV blocks, HTTP answers, metrics and failures."""
