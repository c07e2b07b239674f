"""kvsteer, the endpoint picker: where each LLM request goes, and why."""
