"""KV events: what every worker says it stored, removed or cleared, followed without loss going unnoticed."""
