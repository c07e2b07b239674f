"""Block keys and what each endpoint is believed to hold."""
