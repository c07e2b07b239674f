"""The emulated vLLM worker: one engine model, two drivers (virtual time and real time)."""
